"""A killed run on given responses resumes from its checkpoint, with the results of an undisturbed run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from local_runs import run_locally
from recipe_runs import GUARD_S, ROOT, RunFolder

from tests.recipe_copies import write_untrained

STEPS, SAVE_STEPS, LAST = 16, 4, 10
"""Number of steps, checkpoint interval, and step of the kill, which is in the second epoch, after a checkpoint of the
first.
"""
OPTIONS = f"""data.path=task:sort data.max_samples=160 evaluation.held_out=32 train.batch_size=16 train.epochs=2
    checkpoint.every={SAVE_STEPS} train.learning_rate=1e-3""".split()

KILLED = f"""
import os, signal, sys
from importlib import import_module
from training.tracking import Tracker

def log(tracker, step, metrics, log=Tracker.log, **told):
    log(tracker, step, metrics, **told)
    if step == {LAST}:
        os.kill(os.getpid(), signal.SIGKILL)

Tracker.log = log
import_module(f"recipes.{{sys.argv[1]}}.main").main(sys.argv[2:])
"""
"""The process kills itself, because other processes may see this step only after the run has ended."""


def exact(run: RunFolder) -> dict[str, Any]:
    """Return all results of a run, except times."""
    weights = {name: tensor.numpy().tobytes() for name, tensor in run.weights().items()}
    assert {name.partition("/")[0] for name in weights} == {"hf", "state"}
    note = json.loads((run.run_dir / "checkpoints" / f"step_{STEPS}" / "hf" / "config.json").read_text())
    return {"metrics": run.learnt(), "weights": weights, "score": run.summary["score"], "note": note}


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["reward_model", "dpo", "sft"])
def test_a_killed_and_resumed_run_has_the_metrics_and_weights_of_an_undisturbed_one(
    recipe: str, tmp_path: Path
) -> None:
    arguments = [f"model.path={write_untrained(tmp_path / 'model')}", *OPTIONS]
    arguments += [] if recipe == "sft" else ["evaluation.every=7"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, recipe, f"run_dir={tmp_path}/run", *arguments, "backend=local"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert RunFolder(tmp_path / "run").metrics[-1]["step"] == LAST

    runs = run_locally(recipe, tmp_path, {"run": arguments, "undisturbed": arguments})
    assert runs["run"].summary["resumed_from"] == 2 * SAVE_STEPS
    actual, expected = exact(runs["run"]), exact(runs["undisturbed"])
    assert actual["metrics"] == expected["metrics"]
    assert [line["step"] for line in actual["metrics"]] == list(range(STEPS + 1))
    assert actual["weights"].keys() == expected["weights"].keys()
    assert [name for name in actual["weights"] if actual["weights"][name] != expected["weights"][name]] == []
    assert (actual["score"], actual["note"]) == (expected["score"], expected["note"])
    assert ("mean" in actual["note"]) == (recipe == "reward_model")
