"""Options of every run, independent of the recipe. This module does not import torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from components.process.heartbeat import listen
from components.ranges import CountFromZero, NameOf, Range
from components.registry import load, require
from core import beat
from training.options.schema import Options, errors_of, of_plugin, recipe_of

# Progress of components counts as a heartbeat of core in every process. Otherwise a long computation would be taken for
# a hung process, and terminated after stall_timeout.
listen(beat)


def new_run_dir(recipe: str) -> str:
    """Return the default folder of a run: runs/<recipe>-<time>."""
    return f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"


Seed = Annotated[int, Range(least=0, most=2**63 - 1)]
"""Seed within the range that generators of random numbers accept."""
Steps = Annotated[int, Range(least=1, also=-1)]
"""Interval in steps. -1 has a special meaning for each option."""


@dataclass(kw_only=True)
class RunOptions(Options):
    """Options of every run, independent of the recipe."""

    run_dir: str = ""
    """Folder for all output of the run. Default: runs/<recipe>-<time>."""
    seed: Seed = 42
    """Random seed of the order of the prompts and of sampling."""
    dry_run: bool = False
    """Print the placement of all roles as JSON and exit."""
    emit: Annotated[str, NameOf("manifest", ("none",))] = of_plugin("manifests", "none")
    """Print a file that starts the planned run on a cluster, and exit. `kuberay`: a RayJob. `skypilot`: a task. `none`:
    start the run. Use it with assume_devices."""
    assume_devices: str | None = None
    """With dry_run or rehearse: plan for other machines than this one. Format: GPUs per machine x machines, as 8x2;
    with the memory of a GPU, as 8x2x80GB; or 8, for placement.nodes machines. Errors about local models and data are
    then notes of a dry run."""
    print_config: bool = False
    """Print the complete configuration as YAML and exit."""
    rehearse: bool = of_plugin("rehearsal", False)
    """Rehearse the run on this machine without GPUs, with a small copy of the model, and exit with 0 (go) or 1 (no-go).
    The run is planned for the machines of assume_devices, or for 8 GPUs of 80 GB on each of its nodes."""
    resume: str = "auto"
    """Checkpoint to resume from. `auto`: the latest checkpoint of run_dir, if there is one. A path: that step, run or
    folder of checkpoints. `none`: start a new run; run_dir must not contain one."""
    backend: Literal["ray", "local"] = "ray"
    """Location of the roles. `ray`: one process per role instance. `local`: all roles in this process, one at a time,
    for breakpoints."""
    max_restarts: CountFromZero = 3
    """Maximum number of restarts from the latest checkpoint after a rank dies, and of engine replacements before a
    restart. Workers lost together (for example with their node) count once."""
    stall_timeout: float = 1800.0
    """Seconds without progress after which a process is terminated as hung. 0 disables it."""
    placement_timeout: float = 30.0
    """Seconds to wait for free resources at the start and when an engine is replaced. With an autoscaler, set it longer
    than the time to add a node."""

    def __post_init__(self) -> None:
        if not self.run_dir:
            self.run_dir = new_run_dir(recipe_of(type(self)))
        self.dry_run = self.dry_run or self.emit != "none"
        super().__post_init__()

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        # Only a path certainly needs the plug-in. For `auto` the command checks it once the folder is known.
        if self.resume not in ("auto", "none"):
            yield from errors_of("", require, "checkpoint reader", "run", f"resume={self.resume}")
        if self.assume_devices is not None:
            yield from errors_of("", self._check_machines)
            if not (self.dry_run or self.print_config or self.rehearse):
                yield f"assume_devices={self.assume_devices} only works with dry_run; set dry_run=true, or leave it out"

    def _check_machines(self) -> None:
        load("assumed machines", "check", f"assume_devices={self.assume_devices}")(self.assume_devices)
