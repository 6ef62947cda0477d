"""Options of checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from components.ranges import Count, Positive
from training.options.run_options import Steps
from training.options.schema import Options, of_plugin
from training.run.checkpoint import Checkpoints


@dataclass(kw_only=True)
class CheckpointOptions(Options, group="checkpoint"):
    """Checkpoints: interval, retention and location."""

    every: Steps = -1
    """Interval between checkpoints, in steps. -1 writes one only for a new best policy, at the end of training, and
    when the run is stopped."""
    keep: Count = 3
    """Number of recent checkpoints to keep. The best checkpoint is kept in addition."""
    max_gb: Positive | None = None
    """Maximum total size of the checkpoints in GB. No limit by default."""
    path: str | None = None
    """Folder of the checkpoints. Default: run_dir/checkpoints."""
    export_path: str | None = None
    """Additional folder for the trained policy. By default the policy is only in the checkpoints."""
    export: Literal["last", "best"] = of_plugin("best_policy", "last")
    """Step that is exported to export_path: the last one, or the one with the best score on held-out data, by
    evaluation.best_metric in RL and by accuracy or loss in supervised recipes. `best` writes a checkpoint for each new
    best step."""

    def store(self, run_dir: str, least_bytes: int = 0) -> Checkpoints:
        """Return the checkpoint store of a run.

        Args:
            run_dir: folder of the run.
            least_bytes: minimum size of one checkpoint, in bytes.
        """
        max_gb = self.max_gb or math.inf
        # GB and not GiB, as `df -H` and the manufacturers of disks count.
        return Checkpoints(self.path or Path(run_dir) / "checkpoints", self.keep, max_gb * 1e9, least_bytes)
