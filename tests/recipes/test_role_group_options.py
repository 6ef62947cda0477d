"""The options of grpo and reinforce_pp, and options that are rejected before the start."""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import ROOT

from plugins.assumed_machines.machines import Machines, assuming
from tests.messages import says

RECIPES = ("grpo", "reinforce_pp")
OWN = ["model.path=x", "data.path=task:sort"]
"""A model and data of the user, so that no preset is read."""


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def main(recipe: str) -> Any:
    """main.py of the recipe."""
    return import_module(f"recipes.{recipe}.main")


@pytest.fixture
def refused(main: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Run with invalid options. Return the one line with the reason."""

    def run(*options: str) -> str:
        folder = tmp_path / "refused"
        assert main.main([f"run_dir={folder}", *options]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert not (folder / "plan.json").exists()
        return error

    return run


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("prompts_per_stp", "prompts_per_step"),
        ("train.learning_rte", "train.learning_rate"),
        ("learning_rate", "train.learning_rate"),
        ("algorithm.klcoef", "algorithm.kl_coef"),
    ],
)
def test_the_error_for_an_unknown_option_names_the_nearest_option(
    refused: Callable[..., str], key: str, nearest: str
) -> None:
    assert re.search(says(key, f"'{nearest}'"), refused(f"--{key}=1"))


def test_the_command_line_overrides_files_and_later_files_override_earlier_ones(main: Any, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("prompts_per_step: 8\nsamples_per_prompt: 4\ntrain: {learning_rate: 0.5}\n")
    (tmp_path / "b.yaml").write_text("samples_per_prompt: 2\ntrain: {max_tokens: 77}\n")
    files = ["--config", f"{tmp_path}/a.yaml", "--config", f"{tmp_path}/b.yaml"]
    config = main.read_config([*OWN, *files, "--train.max_tokens=99", "--train.eps", "1e-3", "seed=7"])
    assert (config.prompts_per_step, config.samples_per_prompt, config.seed) == (8, 2, 7)
    assert (config.train.learning_rate, config.train.max_tokens, config.train.eps) == (0.5, 99, 1e-3)


def test_a_model_path_in_a_file_counts_like_one_on_the_command_line(main: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {path: mine}\ndata: {path: 'task:sort'}\n")
    assert main.read_config([]).train.learning_rate == 1e-4
    assert main.read_config(["seed=3"]).model.path == "warm_start:sort"
    for arguments in (OWN, ["--config", f"{tmp_path}/mine.yaml"]):
        config = main.read_config(arguments)
        assert config.train.learning_rate == 1e-6, arguments
        assert config.model.path in ("x", "mine")


def test_the_demonstration_runs_40_steps_of_512_responses(main: Any) -> None:
    config = main.read_config([])
    facts = ["40 steps", "64 prompts", "8 responses", 512, "4 optimizer steps", "128 responses", "16384 tokens"]
    assert re.search(says(*facts), config.arithmetic(2560))


def test_the_plan_reports_prompts_of_an_incomplete_last_step(main: Any) -> None:
    config = main.read_config([*OWN, "prompts_per_step=8", "samples_per_prompt=2", "train.epochs=2", "data.epochs=3"])
    # 3 epochs of 9 prompts are 3 steps of 8, and 3 more prompts.
    facts = ["3 steps", "8 prompts", "2 responses", "2 optimizer steps", "16 responses", "last 3 prompts"]
    assert re.search(says(*facts), config.arithmetic(9))


def test_a_printed_configuration_can_be_loaded_again(
    main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["--print_config", "seed=5", f"run_dir={tmp_path}/run"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(text)
    again = main.read_config(["--config", f"{tmp_path}/printed.yaml"])
    assert (again.seed, again.model.path, again.train.precision) == (5, "warm_start:sort", "fp32")
    assert again == main.read_config(["seed=5", f"run_dir={tmp_path}/run"])
    assert not (tmp_path / "run").exists()


def test_every_option_has_a_description_in_the_help(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("--")]
    assert len(options) > 70
    assert [lines[i] for i in options if i + 1 == len(lines) or not lines[i + 1].startswith("    ")] == []


def test_dry_run_prints_the_plan_without_ray_or_torch(recipe: str) -> None:
    script = (
        f"import sys; from recipes.{recipe}.main import main;"
        "code = main(['--dry_run', 'placement.rollout_engines=2', 'algorithm.kl_coef=0.1']);"
        "print('HEAVY', sorted({'ray', 'torch', 'transformers'} & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    *table, imported = done.stderr.splitlines()
    assert (done.returncode, imported) == (0, "HEAVY []")
    assert re.search(r"rollout +2 x ", done.stderr)
    assert (len(table) <= 15, max(map(len, table)) <= 100) == (True, True)
    plan = json.loads(done.stdout)["placement"]
    assert plan["processes"] == {"TRAINER": 1, "ACTOR": 1, "ROLLOUT": 2, "REFERENCE": 1}
    # In CPU seconds, because wall time also depends on other processes.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


@pytest.mark.parametrize(
    ("cores", "options", "threads"),
    [
        # Roles that work in turn use all cores each. Ranks and engines that work at the same time share them.
        (4, [], {"ACTOR": 4, "ROLLOUT": 4, "REFERENCE": 4}),
        (4, ["placement.rollout_engines=2"], {"ACTOR": 4, "ROLLOUT": 2, "REFERENCE": 4}),
        (4, ["placement.actor_ranks=2", "train.zero_stage=2"], {"ACTOR": 2, "ROLLOUT": 4, "REFERENCE": 4}),
        # On separate devices, policy and reference compute log-probabilities at the same time.
        (4, ["placement.colocate=false"], {"ACTOR": 2, "ROLLOUT": 4, "REFERENCE": 2}),
        (4, ["placement.colocate=false", "placement.references=3"], {"ACTOR": 1, "ROLLOUT": 4, "REFERENCE": 1}),
        (4, ["placement.colocate=false", "algorithm.kl_coef=0"], {"ACTOR": 4, "ROLLOUT": 4}),
        (1, ["placement.rollout_engines=2"], {"ACTOR": 1, "ROLLOUT": 1, "REFERENCE": 1}),
        # On a cluster the cores of other machines are unknown: all cores, or a part.
        (None, [], {"ACTOR": -1, "ROLLOUT": -1, "REFERENCE": -1}),
        (None, ["placement.nodes=2", "placement.actor_ranks=4"], {"ACTOR": -2, "ROLLOUT": -1, "REFERENCE": -1}),
    ],
)
def test_the_plan_lists_the_threads_of_each_role(
    main: Any, cores: int | None, options: list[str], threads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores or 4))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if cores is None:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    job = main.build_job(main.read_config(["algorithm.kl_coef=0.1", *options]))
    threads_of = {host.workers[0][0]: host.threads for host in job.placement.hosts}
    assert {role: count for role, count in threads_of.items() if role != "TRAINER"} == threads


@pytest.mark.parametrize(
    ("gpus", "options", "devices"),
    [
        # On two devices, two ranks of each of three roles have a third of a device each, and of two roles a half.
        ("0,1", ["algorithm.kl_coef=0.1"], {"ACTOR": 2 / 3, "ROLLOUT": 2 / 3, "REFERENCE": 2 / 3}),
        ("0,1", ["algorithm.kl_coef=0"], {"ACTOR": 1.0, "ROLLOUT": 1.0}),
        (
            "0,1,2",
            ["algorithm.kl_coef=0.1", "placement.colocate=false"],
            {"ACTOR": 1.0, "ROLLOUT": 1.0, "REFERENCE": 1.0},
        ),
    ],
)
def test_roles_share_gpus_or_get_separate_ones(
    main: Any, gpus: str, options: list[str], devices: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    config = main.read_config(options)
    assert config.train.precision == "bf16"
    assert config.placement.rollout_engines == (1 if "placement.colocate=false" in options else 2)
    role_devices = main.build_job(config).placement.devices
    assert {role: role_devices[role] for role in devices} == pytest.approx(devices, abs=0.01)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["rollout.tensor_parallel=3"], ["actor_ranks=4", "rollout_engines=1", "tensor_parallel=3"]),
        (["rollout.tensor_parallel=2", "placement.rollout_engines=4"], ["actor_ranks=4", "rollout_engines=4"]),
        (["rollout.tensor_parallel=8", "placement.nodes=2"], ["tensor_parallel=8", "a machine has 4 GPUs"]),
    ],
)
def test_the_number_of_engines_on_shared_gpus_follows_from_their_devices(
    main: Any, options: list[str], facts: list[object]
) -> None:
    with assuming(Machines(devices=4)):
        config = main.read_config(["rollout.tensor_parallel=2", "algorithm.kl_coef=0.1"])
        placement = config.placement
        assert (placement.actor_ranks, placement.rollout_engines, placement.references) == (4, 2, 4)
        assert main.build_job(config).placement.processes["ROLLOUT"] == 2
        with pytest.raises(ValueError, match=says(*facts)):
            main.read_config(options)


BOTH: list[tuple[list[str], list[object]]] = [
    (["data.path=task:sort"], ["model.path"]),
    (["model.path=x"], ["data.path"]),
    ([*OWN, "prompts_per_step=0"], ["prompts_per_step=0"]),
    ([*OWN, "train.mini_batch_size=0"], ["mini_batch_size=0"]),
    ([*OWN, "train.epochs=0"], ["epochs=0"]),
    ([*OWN, "prompts_per_step=5", "samples_per_prompt=3", "train.mini_batch_size=4"], ["train.mini_batch_size=4", 15]),
    (["model.path=x", "data.path=rows.jsonl"], ["data.path=rows.jsonl", "reward"]),
    ([*OWN, "algorithm.clip_low=1.5"], ["algorithm.clip_low", 1.5]),
    ([*OWN, "algorithm.clip_high=-0.1"], ["algorithm.clip_high", -0.1]),
    ([*OWN, "algorithm.kl_coef=-1"], ["algorithm.kl_coef=-1.0"]),
    ([*OWN, "algorithm.kl_estimator=k9"], ["algorithm.kl_estimator", "k9", "k1", "k3"]),
    ([*OWN, "rollout.temperature=-1"], ["temperature=-1.0"]),
    ([*OWN, "rollout.max_new_tokens=0"], ["max_new_tokens=0"]),
    ([*OWN, "train.learning_rate=-1"], ["learning_rate=-1.0"]),
    ([*OWN, "data.epochs=0"], ["data.epochs=0"]),
    ([*OWN, "evaluation.every=0"], ["evaluation.every=0", -1]),
    ([*OWN, "checkpoint.every=0"], ["checkpoint.every=0", -1]),
    ([*OWN, "reward.workers=0"], ["reward.workers=0"]),
    ([*OWN, "seed=-1"], ["seed=-1"]),
    ([*OWN, "placement.nodes=2", "placement.actor_ranks=3"], ["placement.actor_ranks=3", "2 nodes", "placement.nodes"]),
    ([*OWN, "backend=local", "placement.actor_ranks=2"], ["local", 2]),
]


@pytest.mark.parametrize(("options", "facts"), BOTH)
def test_invalid_options_are_rejected_with_the_option_to_set(
    refused: Callable[..., str], tmp_path: Path, options: list[str], facts: list[object]
) -> None:
    (tmp_path / "none.yaml").write_text("model: {path: ''}\n")
    has_model = "model.path=x" in options
    assert re.search(says(*facts), refused(*options, *([] if has_model else ["--config", str(tmp_path / "none.yaml")])))


@pytest.mark.parametrize(
    ("recipe", "options", "facts"),
    [
        ("grpo", ["samples_per_prompt=1"], ["samples_per_prompt=1", 2]),
        ("grpo", ["algorithm.filter_range=[1,0]"], ["algorithm.filter_range", 1.0, 0.0]),
        ("grpo", ["algorithm.overlong_buffer=0"], ["algorithm.overlong_buffer=0", "rollout.max_new_tokens=1024"]),
        ("grpo", ["algorithm.overlong_buffer=1025"], ["algorithm.overlong_buffer=1025", "rollout.max_new_tokens=1024"]),
        ("grpo", ["algorithm.correction_range=[2,1]"], ["algorithm.correction_range", 2.0, 1.0]),
        ("grpo", ["algorithm.ratio=word"], ["algorithm.ratio", "word"]),
        ("reinforce_pp", ["samples_per_prompt=0"], ["samples_per_prompt=0", 1]),
        (
            "reinforce_pp",
            ["algorithm.baseline=group_mean"],
            ["algorithm.baseline=group_mean", "samples_per_prompt=1", 2],
        ),
        ("reinforce_pp", ["algorithm.baseline=leave_one_out"], ["algorithm.baseline=leave_one_out", 2]),
        ("reinforce_pp", ["algorithm.gamma=1.1"], ["algorithm.gamma=1.1"]),
        ("reinforce_pp", ["algorithm.reward_range=[1,1]"], ["algorithm.reward_range", 1.0]),
        ("reinforce_pp", ["algorithm.kl_estimator=k3+"], ["k3+"]),  # it has no meaningful gradient in a reward
    ],
)
def test_invalid_options_of_a_single_recipe_are_rejected(
    recipe: str, refused: Callable[..., str], options: list[str], facts: list[object]
) -> None:
    assert re.search(says(*facts), refused(*OWN, *options))


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (["model.path=./nowhere", "data.path=task:sort"], ["model.path=./nowhere"]),
        (["data.path=nowhere.jsonl", "reward.source=exact_match"], ["nowhere.jsonl"]),
        (["data.path=task:sport", "reward.source=sort"], ["sport"]),
        (["reward.source=nowhere.py"], ["nowhere.py"]),
        (["reward.source=sport"], ["sport"]),
        (["data.path=DIR/rows.jsonl", "data.prompt_key=question", "reward.source=gsm8k"], ["label"]),
        (["data.path=DIR/rows.jsonl", "data.prompt_key=quest", "reward.source=exact_match"], ["quest"]),
        (["evaluation.path=DIR/gone.jsonl"], ["gone.jsonl"]),
        (["prompts_per_step=4000"], ["task:sort", 2560, "prompts_per_step=4000"]),
        (["run_dir=/proc/nowhere"], ["run_dir=/proc/nowhere"]),
        (["resume=DIR/nothing"], ["nothing"]),
    ],
)
def test_missing_inputs_are_rejected_in_one_line_before_the_start(
    refused: Callable[..., str], tmp_path: Path, options: list[str], facts: list[object]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "ab>", "response": "ab"}\n')
    options = [option.replace("DIR", str(tmp_path)) for option in options]
    if any(option.startswith("data.path=") and "jsonl" in option for option in options):
        options.append("evaluation.path=null")
    assert re.search(says(*facts), refused(*options))


def test_the_dapo_preset_sets_clip_higher_filtered_prompts_and_a_soft_length_limit() -> None:
    algorithm = load("grpo", "dapo").algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.loss_aggregation, algorithm.kl_coef) == (
        0.2,
        0.28,
        "token-mean",
        0.0,
    )
    assert (algorithm.filter_range, algorithm.overlong_buffer, algorithm.overlong_penalty, algorithm.std_norm) == (
        (0.0, 1.0),
        2,
        1.0,
        True,
    )
    # The filter may leave fewer prompts for the last step, so there may be an additional one.
    assert "at most 41 steps" in load("grpo", "dapo").arithmetic(2561)


def test_the_dr_grpo_preset_divides_by_neither_deviation_nor_length() -> None:
    algorithm = load("grpo", "dr_grpo").algorithm
    assert (algorithm.std_norm, algorithm.loss_aggregation, algorithm.kl_coef) == (
        False,
        "seq-mean-token-sum-norm",
        0.0,
    )
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.filter_range) == (0.2, 0.2, None)


def test_the_two_presets_of_reinforce_pp_differ_in_baseline_and_whitening() -> None:
    algorithms = [load("reinforce_pp", name).algorithm for name in ("baseline", "rloo")]
    assert [(algorithm.baseline, algorithm.whiten) for algorithm in algorithms] == [
        ("group_mean", True),
        ("leave_one_out", False),
    ]
    plain = import_module("recipes.reinforce_pp.main").read_config(OWN).algorithm
    assert (plain.baseline, plain.whiten, plain.kl_estimator) == ("none", True, "k1")


def load(recipe: str, name: str) -> Any:
    """The demonstration with one of the recipe's configuration files."""
    file = ROOT / "recipes" / recipe / f"{name}.yaml"
    return import_module(f"recipes.{recipe}.main").read_config(["--config", str(file)])
