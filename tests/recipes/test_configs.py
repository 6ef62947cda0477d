"""The configurations of published models: each is planned with the real dimensions of its model, and fits its
machines.
"""

import json
import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("recipes/*/configs/*.yaml"))
MACHINES = [
    (path, machines)
    for path in CONFIGS
    for machines in re.findall(r"^# machines: (.*)$", path.read_text(), re.MULTILINE)[0].split()
]


@pytest.fixture(scope="module")
def shapes() -> dict[str, Any]:
    """The entries of each model's config.json that determine its size."""
    return runpy.run_path(str(ROOT / "scripts/plan_table.py"))["MODELS"]


@pytest.mark.parametrize(("path", "machines"), MACHINES, ids=lambda x: x.stem if isinstance(x, Path) else x)
def test_the_plan_of_each_configuration_fits_its_machines(
    path: Path, machines: str, shapes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = path.parents[1].name
    (name,) = re.findall(r"path: Qwen/(Qwen2.5-[\d.]+B)", path.read_text())
    shape = shapes[name] | {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    options = [f"config={path}", f"model.path={tmp_path}", f"assume_devices={machines}", "dry_run=true"]
    main = import_module(f"recipes.{recipe}.main").COMMAND.main
    assert main(options) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [place for place in plan["places"] if place["verdict"] != "fits"] == []
    devices, nodes = map(int, machines.split("x")[:2])
    ranks = next(role["processes"] for role in plan["memory"] if role["role"] == "ACTOR")
    assert ranks == devices * nodes


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_configuration_has_its_command_and_notes_that_it_is_not_measured(path: Path) -> None:
    head = path.read_text().partition("model:")[0]
    assert f"--config {path.relative_to(ROOT)}\n" in head
    assert "not been measured" in head


def test_the_configurations_cover_common_model_sizes() -> None:
    named = {(path.parents[1].name, size) for path in CONFIGS for size in re.findall(r"_([\d.]+b)_", path.stem)}
    assert {("grpo", size) for size in ("0.5b", "1.5b", "7b", "32b")} <= named
    assert {recipe for recipe, _ in named} == {"grpo", "openrlhf_ppo", "sft", "dpo"}


def test_prompts_written_by_the_gsm8k_script_are_read_unchanged(tmp_path: Path) -> None:
    from components.data.prompts import load_rows
    from components.rewards.scorers import get_scorer

    row = {"prompt": [{"role": "user", "content": "3 + 4?"}], "reward_model": {"style": "rule", "ground_truth": "7"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (loaded,) = load_rows(f"{tmp_path}/train.jsonl", "prompt", "reward_model.ground_truth")
    assert loaded["input"][-1]["content"] == "3 + 4?"
    assert get_scorer("gsm8k")("so #### 7", loaded["label"]) == 1.0
    with pytest.raises(ValueError, match=says("reward_model.truth", "label_key")):
        load_rows(f"{tmp_path}/train.jsonl", "prompt", "reward_model.truth")
