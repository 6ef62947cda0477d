"""Optimizer steps of a training step: their metrics, and a batch that could not be trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.batch import Batch

FIRST = ("ratio_mean", "engine_gap")
"""Metrics whose value in the first optimizer step of a batch is told apart."""


def over_updates(history: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step: means over its optimizer steps, and of the first one `first_ratio_mean`.

    On the first the policy is the one that made the old log-probabilities, so the ratio is 1 there.
    """
    means = {name: sum(entry[name] for entry in history) / len(history) for name in history[0]}
    return means | {f"first_{name}": history[0][name] for name in FIRST if name in history[0]}


def keep_failed(run_dir: str, step: int, role: str, minibatch: Batch, rank: int) -> str:
    """Write a batch that could not be trained on to the run folder, once; says where."""
    path = Path(run_dir) / "failed" / f"step_{step:06d}-{role.lower()}.parquet"
    if rank == 0:
        minibatch.save(path)
    return f"the batch is in {path}"
