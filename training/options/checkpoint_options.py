"""Options of checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from components.ranges import Count, Positive
from training.options.run_options import Steps
from training.options.schema import Options
from training.run.checkpoint import Checkpoints


@dataclass(kw_only=True)
class CheckpointOptions(Options, group="checkpoint"):
    """Checkpoints: when they are written, and how many are kept."""

    every: Steps = -1
    """A checkpoint every so many steps; -1 only for the best policy, when the training ends, or when it is stopped."""
    keep: Count = 3
    """How many checkpoints are kept, the newest ones; the best stays beside them."""
    max_gb: Positive | None = None
    """What all of them may take together. Default: any."""
    path: str | None = None
    """Folder of the checkpoints. Default: run_dir/checkpoints."""
    export_path: str | None = None
    """A second place for the trained policy; it is always in the checkpoints."""

    def store(self, run_dir: str, least_bytes: int = 0) -> Checkpoints:
        """The step folders of a run, of which each takes `least_bytes` at least."""
        most = math.inf if self.max_gb is None else self.max_gb * 1e9
        return Checkpoints(self.path or Path(run_dir) / "checkpoints", self.keep, most, least_bytes)
