"""A run on pairs that was killed goes on from its checkpoint, and ends as one that was not."""

import json
from pathlib import Path
from typing import Any

import pytest
from local_runs import run_locally
from recipe_runs import Run, RunFolder

from tests.recipe_copies import write_untrained

pytestmark = pytest.mark.timeout(300)

STEPS, EPOCH, SAVE_STEPS = 48, 24, 16
OPTIONS = f"""dataset=task:sort max_samples=416 eval_samples=32 eval_steps=20 train_batch_size=16 max_epochs=2
    save_steps={SAVE_STEPS} learning_rate=1e-3""".split()


def exact(run: RunFolder) -> dict[str, Any]:
    """Everything that a run has learnt and measured, but for times."""
    weights = {name: tensor.numpy().tobytes() for name, tensor in run.weights().items()}
    assert {name.partition("/")[0] for name in weights} == {"hf", "state"}
    note = json.loads((run.run_dir / "checkpoints" / f"step_{STEPS}" / "hf" / "config.json").read_text())
    return {"metrics": run.learnt(), "weights": weights, "score": run.summary["score"], "note": note}


@pytest.mark.parametrize("recipe", ["reward_model", "dpo"])
def test_a_run_that_was_killed_ends_with_the_metrics_and_weights_of_one_that_was_not(
    recipe: str, tmp_path: Path
) -> None:
    given = [f"pretrain={write_untrained(tmp_path / 'model')}", *OPTIONS]
    killed = Run(recipe, "", tmp_path / "run", *given, "backend=local")
    first = killed.run_dir / "checkpoints" / f"step_{SAVE_STEPS}"
    # In its second epoch; its checkpoint is of the first.
    killed.wait_until(lambda: first.is_dir() and len(killed.metrics) > EPOCH + 2, pause=0.005)
    killed.process.kill()
    killed.process.communicate(timeout=10)
    assert killed.summary["status"] not in ("finished", "stopped")
    reached = (killed.run_dir / "checkpoints" / "latest").read_text().strip()

    runs = run_locally(recipe, tmp_path, {"run": given, "undisturbed": given})
    assert runs["run"].summary["resumed_from"] == int(reached.removeprefix("step_")) < STEPS
    found, expected = exact(runs["run"]), exact(runs["undisturbed"])
    assert found["metrics"] == expected["metrics"]
    assert [line["step"] for line in found["metrics"]] == list(range(STEPS + 1))
    assert found["weights"].keys() == expected["weights"].keys()
    assert [name for name in found["weights"] if found["weights"][name] != expected["weights"][name]] == []
    assert (found["score"], found["note"]) == (expected["score"], expected["note"])
    assert ("mean" in found["note"]) == (recipe == "reward_model")
