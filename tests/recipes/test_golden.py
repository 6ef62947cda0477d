"""Golden traces: five updates of each recipe on stored rollouts give the stored metrics.

After an intended change run `python scripts/golden.py`, whose output lists the changed metrics.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from local_runs import kept_environment
from recipe_runs import ROOT

from components.process.code_files import load_file
from tests.messages import says
from tests.recipe_copies import RECIPES, cloned, copied

GOLDEN = Path(__file__).parent / "golden"
golden: Any = load_file(ROOT / "scripts" / "golden.py")


def trace(folder: Path, recipe: str) -> list[dict[str, Any]]:
    return json.loads((folder / f"{recipe}.json").read_text())


@pytest.mark.parametrize("recipe", golden.RECIPES)
def test_five_updates_give_the_stored_metrics(recipe: str) -> None:
    with kept_environment():
        assert golden.moved(trace(GOLDEN, recipe), golden.played(recipe, GOLDEN)) == []


def test_the_script_prints_and_stores_changed_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    changed, loss = trace(GOLDEN, "sft"), trace(GOLDEN, "sft")[2]["loss"]
    changed[2]["loss"] *= 1.25
    (tmp_path / "sft.json").write_text(json.dumps(changed))
    monkeypatch.setattr("sys.argv", ["golden.py", "--folder", str(tmp_path), "sft", "dpo"])
    capsys.readouterr()
    with kept_environment():
        golden.main()
    assert capsys.readouterr().out == f"sft: step 3 loss: {loss * 1.25:.6g} -> {loss:.6g} (-20.000%)\n"
    assert trace(tmp_path, "sft")[2]["loss"] == pytest.approx(loss, rel=1e-4)
    # Equal values are not rewritten, so that another machine does not change their last digits.
    assert (tmp_path / "dpo.json").read_bytes() == (GOLDEN / "dpo.json").read_bytes()


@pytest.mark.parametrize("recipe", golden.RECIPES)
def test_a_trace_is_small_and_has_values_for_every_step(recipe: str) -> None:
    steps = trace(GOLDEN, recipe)
    assert len(steps) == 5
    assert len({step["loss"] for step in steps}) == 5
    assert all(step["grad_norm"] > 0 for step in steps)
    assert sum((GOLDEN / f"{recipe}.{kind}").stat().st_size for kind in ("json", "parquet")) < 25_000


def test_every_recipe_with_its_own_update_has_a_trace() -> None:
    assert set(RECIPES) - set(golden.RECIPES) == {"multi_turn"}  # it uses grpo's actor


def test_a_recipe_without_a_trace_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["golden.py", "gpro"])
    with pytest.raises(SystemExit, match="2"):
        golden.main()
    assert re.search(says("gpro", *golden.RECIPES), capsys.readouterr().err)


@pytest.mark.nightly
def test_one_command_records_the_regression_test_of_a_copied_recipe(tmp_path: Path) -> None:
    clone = cloned(tmp_path / "clone")
    shutil.copytree(ROOT / "tests", clone / "tests", ignore=shutil.ignore_patterns("__pycache__", "oracle"))
    copied("grpo", clone / "recipes" / "my_algo")
    env = os.environ | {"PYTHONPATH": str(clone)}

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=300)

    recorded = python("scripts/golden.py", "my_algo", "--record", "algorithm.kl_coef=0.05")
    assert recorded.returncode == 0, recorded.stderr
    assert "tests/recipes/test_my_algo.py" in recorded.stdout
    replay = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/recipes/test_my_algo.py")
    assert python(*replay).returncode == 0
    algorithm = clone / "recipes" / "my_algo" / "algorithm.py"
    text = algorithm.read_text()
    algorithm.write_text(text.replace("advantage_B[samples.sequence_ids]", "2 * advantage_B[samples.sequence_ids]"))
    assert algorithm.read_text() != text
    changed = python(*replay)
    assert changed.returncode == 1
    assert "advantage_mean" in changed.stdout


def test_recording_refuses_several_copies_and_copies_that_cannot_be_replayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["grpo", "--record"], ["--record"], ["no_such_recipe", "--record"]):
        monkeypatch.setattr("sys.argv", ["golden.py", *arguments])
        with pytest.raises(SystemExit, match="2"):
            golden.main()
    assert re.search(says("no_such_recipe", "roles/actor.py"), capsys.readouterr().err)
