"""A dry run refuses the same inputs as the run, and plans for missing models without a verdict."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says
from tests.recipes.tiny_models import write_policy

pytestmark = pytest.mark.full

LARGE: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows for each recipe, and a reward function."""
    folder = tmp_path_factory.mktemp("dry_run")
    write_policy(folder / "policy")
    rows = {
        "prompts": {"input": "q", "label": "1"},
        "verl": {"data_source": "mine/own", "prompt": "q", "reward_model": {"style": "rule", "ground_truth": "1"}},
        "sft": {"prompt": "q", "response": "a"},
        "pairs": {"prompt": "q", "chosen": "a", "rejected": "b"},
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    (folder / "reward.py").write_text("def reward_func(queries, **_):\n    return [1.0] * len(queries)\n")
    (folder / "large").mkdir()
    (folder / "large" / "config.json").write_text(json.dumps(LARGE))
    return folder


def planned(recipe: str, options: str, files: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return exit code, plan and messages of a dry run."""
    words = options.replace("FILES", str(files)).split()
    code = import_module(f"recipes.{recipe}.main").main(["--dry_run", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


RL = "model.path=FILES/policy data.path=FILES/prompts.jsonl reward.source=FILES/reward.py rollout.max_new_tokens=4"
STEP = "prompts_per_step=4 samples_per_prompt=2"
VERL = (
    "model.path=FILES/policy data.path=FILES/verl.jsonl rollout.max_new_tokens=4 data.max_prompt_tokens=16 "
    "train.mini_batch_size=8 algorithm.estimator=grpo"
)
REFUSED = [
    ("grpo", f"{RL} prompts_per_step=400", ["8 prompts", "prompts_per_step=400"]),
    ("reinforce_pp", f"{RL} prompts_per_step=400", ["8 prompts", "prompts_per_step=400"]),
    ("multi_turn", f"{RL} prompts_per_step=400 agent.func_path=env:guess reward.source=null", ["8 prompts"]),
    ("openrlhf_ppo", f"{RL} prompts_per_step=400 train.mini_batch_size=400", ["8 prompts", "400"]),
    ("grpo", f"{RL} {STEP} data.prompt_key=question", ["question", "input"]),
    ("grpo", f"{RL} {STEP} data.path=FILES/none.jsonl", ["none.jsonl"]),
    ("grpo", f"{RL} {STEP} reward.source=FILES/none.py", ["none.py"]),
    ("openrlhf_ppo", f"pretrain=FILES/policy prompt_data=FILES/prompts.jsonl {STEP}", ["reward.source"]),
    ("verl_ppo", f"{VERL} {STEP}", ["mine/own", "reward.source"]),
    ("verl_ppo", f"{VERL} {STEP} data.path=FILES/prompts.jsonl", ["prompt"]),
    ("sft", "model.path=FILES/policy data.path=FILES/sft.jsonl evaluation.held_out=8", ["held_out=8", "all 8"]),
    ("dpo", "model.path=FILES/policy data.path=FILES/pairs.jsonl", ["held_out=256", "all 8 pairs"]),
    ("reward_model", "model.path=FILES/policy data.path=FILES/pairs.jsonl", ["held_out=256", "all 8 pairs"]),
    ("dpo", "model.path=FILES/policy data.path=FILES/sft.jsonl evaluation.held_out=1", ["chosen"]),
]


@pytest.mark.parametrize(("recipe", "options", "facts"), REFUSED)
def test_a_dry_run_refuses_what_the_run_refuses(
    recipe: str, options: str, facts: list[str], files: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, error = planned(recipe, options, files, capsys)
    assert code == 2, error
    assert re.search(says(*facts), error)
    words = options.replace("FILES", str(files)).split()
    assert import_module(f"recipes.{recipe}.main").main([*words, f"run_dir={tmp_path}/run", "backend=local"]) == 2
    assert not (tmp_path / "run").exists()
    refused = capsys.readouterr().err.strip().splitlines()[-1]
    assert refused in error


def test_a_plan_for_other_machines_reports_local_data_faults_as_notes(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = planned("verl_ppo", f"{VERL} {STEP} assume_devices=1x1x80GB", files, capsys)
    assert code == 0, error
    assert re.search(says("would be refused", "mine/own"), error)


@pytest.mark.parametrize("model", ["/no/such/32B", "org/no-such-model"])
@pytest.mark.parametrize("machines", ["", "assume_devices=8x1x80GBx1000GB prompts_per_step=8"])
def test_the_plan_has_no_memory_verdict_for_a_missing_model(
    model: str, machines: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, plan, error = planned("grpo", f"{RL} {STEP} model.path={model} {machines}", files, capsys)
    assert code == 0, error
    verdicts = {place["verdict"] for place in json.loads(plan)["places"]} | {*json.loads(plan)["verdicts"].values()}
    assert verdicts == {"not known"}
    assert re.search(says("not known", "config.json is enough", "model.path"), error)
    assert ": fits" not in error


def test_a_config_json_suffices_for_the_memory_plan(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = f"{RL} {STEP} model.path=FILES/large assume_devices=8x4x80GBx1000GB placement.nodes=4 prompts_per_step=32"
    options += " rollout.tensor_parallel=4"
    code, plan, error = planned("grpo", options, files, capsys)
    assert code == 0, error
    assert re.search(says("model.path", "no weights"), error)
    memory = {row["role"]: row for row in json.loads(plan)["memory"]}
    # 32.8 billion parameters in bfloat16. Each of four devices of an engine holds a quarter of them.
    assert memory["ROLLOUT"]["weights"] == pytest.approx(65.5e9 / 4, rel=0.01)
    # One machine has not enough memory, so a dry run for it is refused.
    code, _, error = planned("grpo", f"{RL} {STEP} model.path=FILES/large", files, capsys)
    assert code == 2
    assert "it cannot fit" in error


def test_unused_machines_of_a_plan_are_listed(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idle = []
    for nodes in ("", "placement.nodes=4 prompts_per_step=32"):
        options = f"{RL} {STEP} prompts_per_step=8 assume_devices=8x4x80GB {nodes}"
        code, plan, error = planned("grpo", options, files, capsys)
        assert code == 0, error
        idle.append(json.loads(plan)["idle_nodes"])
        assert ("3 of 4 machines" in error and "placement.nodes=4" in error) == (not nodes)
    assert idle == [3, 0]


def test_the_note_on_unused_prompts_has_the_actual_reason() -> None:
    read = import_module("recipes.grpo.main").read_config
    options = ["model.path=m", "data.path=task:sort", "prompts_per_step=8"]
    assert re.search(says("last 3 prompts", "do not fill a step"), read(options).arithmetic(27))
    limited = read([*options, "max_steps=2"]).arithmetic(27)
    assert re.search(says("11 of 27 prompts", "max_steps=2"), limited)
    assert "fill a step" not in limited
