"""Complete commands of OpenRLHF and verl, with launcher and program, are accepted, or refused with a replacement."""

import re

import pytest

from plugins.openrlhf.adapter import train_ppo
from plugins.pasted_commands.programs import OPENRLHF, OPENRLHF_PROGRAMS, with_program_as_option
from recipes.dpo.main import main as dpo
from recipes.dpo.main import read_config as read_dpo
from recipes.openrlhf_ppo.main import main as openrlhf_ppo
from recipes.verl_ppo.adapter import VERL
from recipes.verl_ppo.main import COMMAND as VERL_COMMAND
from tests.messages import says
from training.options.adapter import WrittenOption

SUBMIT = ["ray", "job", "submit", "--address=http://127.0.0.1:8265", "--no-wait", "--", "python3", "-m"]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["python3", "-m", "openrlhf.cli.train_sft"], ["openrlhf.cli.train_sft=true"]),
        (["deepspeed", "../train_dpo.py"], ["openrlhf.cli.train_dpo=true", "launcher=deepspeed"]),
        (
            ["torchrun", "-m", "verl.trainer.fsdp_sft_trainer"],
            ["verl.trainer.fsdp_sft_trainer=true", "launcher=torchrun"],
        ),
        ([*SUBMIT, "recipe.dapo.main_dapo"], ["recipe.dapo.main_dapo=true", "launcher=ray job submit"]),
        (["python3", "recipe/prime/main_prime.py"], ["recipe.prime.main_prime=true"]),
    ],
)
def test_a_launcher_and_a_program_become_options(words: list[str], options: list[str]) -> None:
    assert with_program_as_option([*words, "--bf16", "a=b"]) == [*options, "--bf16", "a=b"]


@pytest.mark.parametrize(
    "words", [["python3", "a/train_mine.py"], ["python", "-u", "-m", "mine.train"], ["torchrun", "my_program.py"]]
)
def test_a_program_that_is_not_known_is_refused_by_each_table(words: list[str]) -> None:
    option, *rest = with_program_as_option([*words, "data.seed=3"])
    assert (option, rest) == (f"program={words[-1]}", ["data.seed=3"])
    for table, known in ((VERL, "main_ppo"), (train_ppo(), "train_ppo_ray")):
        (fault,) = table.translate([WrittenOption("program", words[-1])]).faults
        assert re.search(says("program", "not known", known), fault)


@pytest.mark.parametrize("words", [["--pretrain", "a.py"], ["remote_rm_url=a/reward.py"], ["grpo", "a.b=c.py"]])
def test_arguments_without_a_program_are_unchanged(words: list[str]) -> None:
    assert with_program_as_option(words) == words


def test_a_command_of_ray_is_accepted_and_its_launcher_is_named() -> None:
    words = VERL_COMMAND.words([*SUBMIT, "verl.trainer.main_ppo", "data.seed=3"])
    translation = VERL.translate([WrittenOption(*word.split("=", 1)) for word in words])
    assert translation.faults == []
    assert ("seed", "3") in {(option.name, option.value) for option in translation.options}
    assert any(re.search(says("no effect of launcher", "run.sh starts Ray"), note) for note in translation.notes)


USE: dict[str, str] = {
    "train_ppo_ray": "recipes/openrlhf_ppo/run.sh",
    "train_ppo": "recipes/openrlhf_ppo/run.sh",
    "train_sft": "recipes/sft/run.sh",
    "train_rm": "recipes/reward_model/run.sh",
    "serve_rm": "recipes.reward_model.serve",
    "train_prm": "recipes/reward_model",
    "train_kd": "recipes/distill",
    "train_opd": "recipes/distill",
    "batch_inference": "vllm run-batch",
    "interactive_chat": "vllm chat",
    "lora_combiner": "merge_and_unload",
}
"""Program of OpenRLHF -> part of the answer of recipes/dpo, which runs train_dpo."""


@pytest.mark.parametrize("program", [name for name in OPENRLHF_PROGRAMS if name not in ("train_dpo", "train_kto")])
def test_each_program_of_openrlhf_has_an_answer(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dpo(["python3", "-m", f"{OPENRLHF}.{program}", "model.path=m", "data.path=d"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says(f"{OPENRLHF}.{program}", USE[program]), line), line


def test_the_program_of_kto_sets_the_loss_of_dpo() -> None:
    command = f"python3 -m {OPENRLHF}.train_kto --pretrain m --dataset d --output_key o --undesirable_loss_weight 2"
    config = read_dpo([*command.split(), "run_dir=x"])
    algorithm = config.algorithm
    assert (algorithm.loss, algorithm.undesirable_weight, config.data.completion_key) == ("kto", 2, "o")


def test_the_program_of_a_recipe_is_accepted_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    for word in (f"{OPENRLHF}.train_ppo_ray", f"{OPENRLHF}.train_ppo"):
        assert train_ppo().translate([WrittenOption(word, "true")]).faults == []
    # The errors are about the flags, not about the program.
    assert openrlhf_ppo(["deepspeed", "train_ppo.py", "--pretrain", "m", "--dataset", "d", "--prompt_data", "d"]) == 2
    message = capsys.readouterr().err
    assert re.search(says("dataset", "train_sft"), message) and "openrlhf.cli" not in message


@pytest.mark.parametrize(
    ("program", "facts"),
    [
        ("recipe.spin.main_spin", ["recipes/dpo"]),
        ("recipe.prime.main_prime", ["implicit reward model"]),
        ("recipe.flowrl.main_flowrl", ["partition function"]),
        ("recipe.disco.main_disco", ["DisCO", "policy_loss.loss_mode"]),
        ("recipe.rep_exp.main_rep_exp", ["trainer of this recipe"]),
        ("verl.trainer.fsdp_sft_trainer", ["recipes/sft"]),
        ("verl.trainer.main_generation", ["vllm run-batch"]),
        ("verl.model_merger", ["from_pretrained"]),
    ],
)
def test_programs_of_verl_without_a_recipe_name_a_replacement(program: str, facts: list[str]) -> None:
    (fault,) = VERL.translate([WrittenOption(program, "true")]).faults
    assert re.search(says(program, *facts), fault)


@pytest.mark.parametrize(
    "program", ["verl.trainer.main_ppo", "recipe.dapo.src.main_dapo", "recipe.entropy.main_entropy"]
)
def test_trainers_of_verl_with_the_algorithms_of_the_recipe_are_accepted(program: str) -> None:
    assert VERL.translate([WrittenOption(program, "true")]).faults == []
