"""Commands of verl's example scripts, releases 0.5.0 to HEAD: all of them are planned, and three are run.

Models, data and code files are local tiny ones, and the requested devices are assumed. Nothing else is replaced. The
three commands run two steps of a few responses on a CPU.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from local_runs import run_here
from peft import LoraConfig, get_peft_model
from tiny_models import write_mixture, write_policy, write_reward_model
from transformers import AutoModelForCausalLM

from recipes.verl_ppo.main import main
from tests.messages import says

pytestmark = pytest.mark.full

COMMANDS = [json.loads(line) for line in (Path(__file__).parent / "upstream/verl.jsonl").read_text().splitlines()]
PLAIN = [command for command in COMMANDS if not command["tags"]]
MEGATRON = [command for command in COMMANDS if command["tags"] == ["megatron"]]
DEFAULTS = Path(__file__).parent / "upstream"
TAKEN = 0.9
"""Minimum share of the plain text commands that are accepted in full."""
MEGATRON_TAKEN = 0.8
REASONS = {
    "npu": ["trainer.device=npu", "NVIDIA"],
}
"""First sentence of the message for commands that use a missing feature."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of files that replace models, data and code of verl's examples."""
    folder = tmp_path_factory.mktemp("verl")
    write_policy(folder / "policy", num_attention_heads=8)  # as many ranks as share a sequence in the example
    write_reward_model(folder / "reward_model", 0)
    adapted: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "policy"), LoraConfig(r=2))
    adapted.save_pretrained(folder / "adapters")
    write_mixture(folder / "mixture", num_attention_heads=8, num_experts=16)
    row: dict[str, Any] = {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "1"}}
    rows = ({**row, "prompt": [{"role": "user", "content": f"{number}?"}]} for number in range(9_000))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tool = {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "tool_schema": {"function": {"name": "score"}}}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [tool]}))
    talk = {"name": "gsm8k", "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}
    (folder / "interaction.yaml").write_text(json.dumps({"interaction": [talk]}))
    (folder / "score.py").write_text("def compute_score(data_source, solution_str, **_):\n    return 0.0\n")
    return folder


def local(argument: str, files: Path, policy: str = "policy") -> str:
    """Return an argument with a local file instead of that of the example."""
    key, _, value = argument.partition("=")
    name = key.lstrip("+")
    if name in ("data.train_files", "data.val_files"):
        value = f"{files}/rows.jsonl"
    elif name in ("reward_model.model.path", "reward.reward_model.model_path"):
        value = f"{files}/reward_model"
    elif name.endswith(("model.path", "tokenizer_path")):
        value = f"{files}/{policy}"
    elif name.endswith("lora_adapter_path"):
        value = f"{files}/adapters"
    elif name.endswith("tool_config_path"):
        value = f"{files}/tools.yaml"
    elif name.endswith("interaction_config_path"):
        value = f"{files}/interaction.yaml"
    elif name == "custom_reward_function.path":
        value = f"{files}/score.py"
    return f"{key}={value}"


def planned(
    arguments: Sequence[str], files: Path, capsys: pytest.CaptureFixture[str], policy: str = "policy"
) -> tuple[int, str]:
    """Return exit code and messages of a dry run on the machines that the command requests."""
    values = {key: value for key, _, value in (word.partition("=") for word in arguments)}
    machines = int(values.get("trainer.nnodes") or 1) + int(values.get("rollout.nnodes") or 0)
    assumed = f"--assume_devices={values.get('trainer.n_gpus_per_node') or 8}x{machines}"
    capsys.readouterr()
    code = main([*(local(word, files, policy) for word in arguments), "--dry_run", assumed])
    return code, capsys.readouterr().err


@pytest.mark.nightly
def test_90_percent_of_the_text_commands_are_accepted_in_full(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = {}
    for command in PLAIN:
        code, said = planned(command["argv"], files, capsys)
        if code != 0:
            refused[command["script"]] = said
    assert len(PLAIN) >= 47
    assert len(refused) <= (1 - TAKEN) * len(PLAIN), refused
    assert refused == {}


@pytest.mark.nightly
def test_80_percent_of_the_megatron_commands_are_accepted_with_their_axes(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused, axes = {}, set[str]()
    for command in MEGATRON:
        shares_experts = any(re.search(r"expert_model_parallel_size=(?!1$)", word) for word in command["argv"])
        code, said = planned(command["argv"], files, capsys, "mixture" if shares_experts else "policy")
        if code != 0:
            refused[command["script"]] = said
        else:
            assert "fully_shard" in said, command["script"]
            axes |= set(re.findall(r"[kMGT]?B \((\w+)\)", said))
    assert len(MEGATRON) >= 20
    assert len(MEGATRON) - len(refused) >= MEGATRON_TAKEN * len(MEGATRON), refused
    assert axes >= {"tensor", "expert"}
    # Adapters combined with an axis, and engines across machines.
    words = ("lora_rank", "rollout.tensor_model_parallel_size=32")
    assert [said for said in refused.values() if not any(word in said for word in words)] == []


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_commands_for_another_generation_engine_are_accepted_with_a_note(
    engine: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = f"actor_rollout_ref.rollout.name={engine}"
    commands = [command for command in COMMANDS if command["tags"] == [engine] and named in command["argv"]]
    assert commands
    for command in commands:
        code, said = planned(command["argv"], files, capsys)
        assert code == 0, (command["script"], said)
        assert re.search(says(named, "vllm generates"), said)


@pytest.mark.parametrize("tag", REASONS)
def test_commands_for_missing_features_are_rejected_with_the_reason_and_the_alternative(
    tag: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [command for command in COMMANDS if tag in command["tags"]]
    assert commands
    for command in commands:
        code, said = planned(command["argv"], files, capsys)
        if code == 0:  # some scripts request NPUs only through the environment
            continue
        first = [line for line in said.splitlines() if "errors in the options" not in line][: len(command["tags"]) + 1]
        reasons = [facts for one, facts in REASONS.items() if one in command["tags"]]
        assert any(re.search(says(*facts), "\n".join(first)) for facts in reasons), said


@pytest.mark.parametrize("name", ["verl_ppo_trainer.yaml", "verl_generated_ppo_trainer.yaml"])
def test_the_default_configuration_of_verl_is_accepted(
    name: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    required = ["data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x", "critic.model.path=x"]
    code, said = planned([f"--config={DEFAULTS / name}", *required], files, capsys)
    assert code == 0, said
    # A configuration with hundreds of keys gives only a few lines of notes.
    assert sum("no effect" in line for line in said.splitlines()) <= 20


FEW = """
    data.train_batch_size=4 data.max_prompt_length=64 data.max_response_length=16 actor_rollout_ref.rollout.n=2
    actor_rollout_ref.actor.ppo_mini_batch_size=2 critic.ppo_mini_batch_size=2 data.val_max_samples=4
    trainer.total_training_steps=2 trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.val_before_train=false
    actor_rollout_ref.rollout.name=hf trainer.logger=console trainer.resume_mode=disable
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 reward_model.reward_kwargs.max_resp_len=16
    reward_model.reward_kwargs.overlong_buffer_cfg.len=4 data.filter_overlong_prompts=true
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 critic.ulysses_sequence_parallel_size=1
"""
"""Numbers for a laptop's CPU and its engine, without external trackers."""


@pytest.mark.parametrize(
    "script",
    [
        "examples/grpo_trainer/run_qwen2-7b.sh",
        "examples/ppo_trainer/run_qwen2-7b_rm_reward_loop_colocate.sh",
        "recipe/dapo/test_dapo_7b_math.sh",
    ],
)
def test_a_verl_command_trains_two_steps(script: str, files: Path, tmp_path: Path) -> None:
    (command,) = [command for command in PLAIN if command["script"] == script]
    arguments = [local(word, files) for word in command["argv"]]
    options = [
        f"trainer.default_local_dir={tmp_path}/checkpoints",
        "data.train_max_samples=8",
        "trainer.total_epochs=1",
    ]
    run = run_here("verl_ppo", tmp_path / "run", *arguments, *FEW.split(), *options)
    assert run.code == 0, run.err
    assert (run.summary["status"], run.summary["steps"]) == ("finished", 2)
    assert all("actor/pg_loss" in line for line in run.metrics)
