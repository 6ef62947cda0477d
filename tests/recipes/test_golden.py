"""Golden traces: five updates of each recipe on stored rollouts give the metrics that are stored beside them.

A change that is meant to move them is followed by `python scripts/golden.py`, whose output says what moved.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import ROOT

pytestmark = pytest.mark.timeout(300)
GOLDEN = Path(__file__).parent / "golden"
RECIPES = ("dpo", "grpo", "openrlhf_ppo", "reinforce_pp", "reward_model", "sft", "verl_ppo")


@pytest.fixture(scope="module")
def refreshed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A copy of the traces in which one number was changed, after the script went over it, and what that printed."""
    folder = tmp_path_factory.mktemp("golden")
    shutil.copytree(GOLDEN, folder, dirs_exist_ok=True)
    changed = json.loads((folder / "sft.json").read_text())
    changed[2]["loss"] *= 1.25
    (folder / "sft.json").write_text(json.dumps(changed))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "golden.py"), "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def trace(folder: Path, recipe: str) -> list[dict[str, Any]]:
    return json.loads((folder / f"{recipe}.json").read_text())


def test_five_updates_of_every_recipe_give_the_metrics_they_gave_before(refreshed: tuple[Path, str]) -> None:
    lines = refreshed[1].splitlines()
    assert [line for line in lines if not line.startswith("sft: step 3 loss:")] == []


def test_the_script_prints_what_moved_and_writes_it_down(refreshed: tuple[Path, str]) -> None:
    folder, output = refreshed
    loss = trace(GOLDEN, "sft")[2]["loss"]
    assert output == f"sft: step 3 loss: {loss * 1.25:.6g} -> {loss:.6g} (-20.000%)\n"
    assert trace(folder, "sft")[2]["loss"] == pytest.approx(loss, rel=1e-4)
    # What has not moved is left as it is, so that another machine does not rewrite it digit by digit.
    assert (folder / "grpo.json").read_bytes() == (GOLDEN / "grpo.json").read_bytes()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_trace_is_small_and_says_something_in_every_step(recipe: str) -> None:
    steps = trace(GOLDEN, recipe)
    assert len(steps) == 5
    assert len({step["loss"] for step in steps}) == 5
    assert all(step["grad_norm"] > 0 for step in steps)
    assert sum((GOLDEN / f"{recipe}.{kind}").stat().st_size for kind in ("json", "parquet")) < 25_000


def test_a_recipe_without_a_trace_is_refused() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "golden.py"), "gpro"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "there is no golden trace of gpro" in done.stderr
