"""Warning at the end of an RL run."""

from __future__ import annotations

from typing import Any


def report(run: Any) -> None:
    """Print a warning if the run ends with a lower score than its best step or its start.

    Args:
        run: a `PolicyRun`.
    """
    if text := verdict(run.evaluation, run.checkpoints.store.folder):
        run.info(text)


def verdict(evaluation: Any, checkpoints: Any) -> str:
    """Return the warning, or an empty string.

    Args:
        evaluation: the `Evaluation` of the run.
        checkpoints: path to the folder of the run's checkpoints.
    """
    last = evaluation.deciding(evaluation.scores.get("end", {}))
    if last is None:
        return ""
    first = evaluation.deciding(evaluation.scores.get("start", {}))
    best = evaluation.best
    warnings: list[str] = []
    # A best step of 0 is the initial model. The second sentence reports that case.
    if best is not None and evaluation.best_step > 0 and best[1] > last[1]:
        folder = checkpoints / f"step_{evaluation.best_step}"
        where = ", of which there is no checkpoint"
        if folder.is_dir():
            where = f": {folder}/hf"
        warnings.append(f"the best policy is that of step {evaluation.best_step}, {last[0]} {best[1]:.3f}{where}")
    if first is not None and last[1] < first[1]:
        warnings.append(f"the end ({last[1]:.3f}) is worse than the start ({first[1]:.3f}): lower train.learning_rate")
    return "; ".join(warnings)
