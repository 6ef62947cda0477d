"""Counters of a run that add the bounds of the phases to the metrics of each step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.registry import find
from plugins.light_meter.bounds import Limits
from plugins.light_meter.work import Lengths, worker_threads
from training.run.progress import Progress
from training.tracking.serialization import json_object

if TYPE_CHECKING:
    from components.batch import Batch
    from training.run.run import Run

READ = {"prompt_length", "prompt_id", "action_mask"}
"""Columns of a batch from which the bounds are computed."""


class BoundProgress(Progress):
    """Counters of a run that trains a policy on its own rollouts. Other runs have no bounds yet."""

    def __init__(self, run: Run[Any]) -> None:
        """
        Args:
            run: the run, whose folder exists.
        """
        super().__init__()
        self._run = run
        self._limits = limits_of(run.config)

    def count(self, took: Mapping[str, float], batch: Batch, memory_bytes: int = 0) -> dict[str, float]:
        """See `Progress.count`. It adds `bound/<phase>_s` and `bound/<phase>_share`, if the speed of the machine is
        known.
        """
        counted = super().count(took, batch, memory_bytes)
        if self._limits is None or not all(name in batch for name in READ):
            return counted
        seconds = {name.removeprefix("timing_s/"): value for name, value in took.items()}
        # The checkpoint of the step before is logged with this one, outside of the clock.
        if written := self._run.checkpoints.metrics.get("timing_s/checkpoint"):
            seconds["checkpoint"] = written
        bounds = self._limits.bounds(Lengths.of_batch(batch), seconds)
        for phase, bound in bounds.items():
            counted[f"bound/{phase}_s"] = bound
            counted[f"bound/{phase}_share"] = bound / max(seconds[phase], 1e-9)
        return counted


def limits_of(config: Any) -> Limits | None:
    """Return the limits of a run, or None if its machine or its model is not known, or if it has no rollouts."""
    cached = find("machine speed", "cached")
    if cached is None or not hasattr(config, "samples_per_prompt"):
        return None
    plan = json_object(Path(config.run_dir) / "plan.json")
    speed = cached(plan.get("device_type") == "GPU")
    if speed is None:
        return None
    limits = Limits.of_run(config, speed, worker_threads(plan))
    if not limits.work:
        return None
    return limits
