"""Metrics over the optimizer steps of a training step, and the dump of a batch that failed to train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.batch import Batch

FIRST = ("ratio_mean", "engine_gap")
"""Metrics that are also reported for the first optimizer step alone."""


def over_updates(history: list[dict[str, float]]) -> dict[str, float]:
    """Return the means over the optimizer steps, and `first_<name>` for the metrics in `FIRST`.

    In the first optimizer step the policy equals the one that computed the old log-probabilities, so
    `first_ratio_mean` is 1.
    """
    # A plain mean: each metric is already weighted within its optimizer step.
    means = {name: sum(entry[name] for entry in history) / len(history) for name in history[0]}
    return means | {f"first_{name}": history[0][name] for name in FIRST if name in history[0]}


def keep_failed(run_dir: str, step: int, role: str, minibatch: Batch, rank: int) -> str:
    """Save a batch that failed to train in the run folder. Only rank 0 writes. Return a message with the path."""
    path = Path(run_dir) / "failed" / f"step_{step:06d}-{role.lower()}.parquet"
    if rank == 0:
        minibatch.save(path)
    return f"the batch is in {path}"
