"""The record of a finished run stays unchanged, byte by byte, when later commands on its folder are rejected."""

import hashlib
import re
from importlib import import_module
from pathlib import Path

import pytest
from local_runs import run_here

from tests.messages import says
from tests.recipe_copies import RECIPES

pytestmark = pytest.mark.full

POLICY = ["max_steps=1", "evaluation.max_samples=8", "data.max_samples=48", "prompts_per_step=16"]
SUPERVISED = ["data.max_samples=40", "evaluation.held_out=8", "train.batch_size=16"]
SMALL = {name: SUPERVISED if name in ("sft", "dpo", "reward_model") else POLICY for name in RECIPES}
"""Options that shorten the demonstration of each recipe to a step or two."""


def digest(folder: Path) -> dict[str, str]:
    """Return every file and link in a folder, with a digest of its content and its modification time."""
    return {
        str(path.relative_to(folder)): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(recipe: str, run_dir: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message of a command on the folder that is rejected before the start and changes no file."""
    before = digest(run_dir)
    capsys.readouterr()
    code = import_module(f"recipes.{recipe}.main").main([f"run_dir={run_dir}", *options, "backend=local"])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, ""), shown
    assert digest(run_dir) == before
    return shown.err


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in ("grpo", "sft") else pytest.mark.full) for name in RECIPES]
)
def test_resuming_with_another_seed_dataset_or_recipe_is_rejected_and_changes_no_file(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, run_dir = SMALL[recipe], tmp_path / "run"
    ended = run_here(recipe, run_dir, *small)
    assert ended.code == 0, ended.err
    fewer = [word for word in small if not word.startswith("data.max_samples")]
    assert re.search(says("seed=7", "seed=42", "run_dir"), refused(recipe, run_dir, [*small, "seed=7"], capsys))
    other_data = refused(recipe, run_dir, [*fewer, "data.max_samples=32"], capsys)
    assert re.search(says("data.path", run_dir, "data.max_samples"), other_data)
    assert re.search(says("resume"), refused(recipe, run_dir, [*small, "resume=none"], capsys))
    assert re.search(says(f"{run_dir}/no"), refused(recipe, run_dir, [*small, f"resume={run_dir}/no"], capsys))
    other = "sft" if recipe != "sft" else "dpo"
    assert re.search(says("run_dir", recipe), refused(other, run_dir, SMALL[other], capsys))
    # The same command continues with it.
    assert run_here(recipe, run_dir, *small).code == 0


def test_resuming_with_other_weights_or_adapters_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from plugins.demo.tasks import get_task
    from plugins.demo.tiny_model import task_tokenizer, tiny_model

    small, run_dir = SMALL["sft"], tmp_path / "run"
    assert run_here("sft", run_dir, *small).code == 0
    assert re.search(
        says("train.lora_rank=4", "train.lora_rank=0"), refused("sft", run_dir, [*small, "train.lora_rank=4"], capsys)
    )
    tokenizer = task_tokenizer(get_task("sort"))
    model = tiny_model(tokenizer, 3)
    model.config.intermediate_size = 64
    type(model)(model.config).save_pretrained(tmp_path / "narrow")
    tokenizer.save_pretrained(tmp_path / "narrow")
    other_model = refused("sft", run_dir, [*small, f"model.path={tmp_path}/narrow", "data.path=task:sort"], capsys)
    assert re.search(says("model.path", "intermediate 64", "384 there"), other_model)


def test_a_finished_run_without_checkpoints_is_not_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, run_dir = SMALL["sft"], tmp_path / "run"
    assert run_here("sft", run_dir, *small).code == 0
    elsewhere = [*small, f"checkpoint.path={tmp_path}/other"]
    assert re.search(says("finished run of 2 steps", f"{tmp_path}/other"), refused("sft", run_dir, elsewhere, capsys))
