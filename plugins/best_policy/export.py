"""Export of the best step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BEST = "best"


def faults(config: Any) -> Iterator[str]:
    """Yield a message for each reason for which the best step cannot be determined or exported."""
    if not config.checkpoint.export_path:
        yield "checkpoint.export=best exports to checkpoint.export_path, which is not set; set it"
    evaluation = config.evaluation
    if not evaluation.path and not getattr(evaluation, "held_out", 0):
        names = [f"evaluation.{name}" for name in ("path", "held_out") if hasattr(evaluation, name)]
        yield f"checkpoint.export=best needs held-out data; set {' or '.join(names)}"
    elif evaluation.every < 1:
        yield "checkpoint.export=best compares the evaluations during training; set evaluation.every"


def is_best(evaluations: dict[str, Mapping[str, float]], metrics: Mapping[str, float], step: int) -> bool:
    """Return True if the held-out metrics of a step are the best so far, and record them as `best`.

    The initial model counts as step 0. A tie keeps the earlier step.

    Args:
        evaluations: metrics of evaluations, with the start as "start". They are part of each checkpoint.
        metrics: metrics of the step, with `eval/...` if it was evaluated.
        step: number of the step.
    """
    heldout = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
    if not heldout:
        return False
    best = evaluations.get(BEST) or evaluations.get("start") or {}
    if best and _score(heldout) <= _score(best):
        return False
    evaluations[BEST] = heldout | {"step": step}
    return True


def export_best(run: Any, folder: Path) -> None:
    """Copy the model of the best step to a folder. Without a best step, export the model of the last one.

    Args:
        run: a `Run`.
        folder: folder to write, which may exist.
    """
    step = run.checkpoints.store.best()
    if step is None:
        run.info("checkpoint.export=best: no step is better than the initial model; the last step is exported")
        run.export(folder)
        return
    shutil.copytree(step / "hf", folder, dirs_exist_ok=True)
    run.info(f"checkpoint.export=best: {step.name} is exported to {folder}")


def _score(metrics: Mapping[str, float]) -> float:
    """Return the number to maximise: the accuracy, or minus the loss of recipes without one."""
    if "accuracy" in metrics:
        return metrics["accuracy"]
    return -metrics["loss"]
