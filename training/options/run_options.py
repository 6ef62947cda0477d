"""Options that every run has, whatever it trains. Nothing here needs torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from components.process.heartbeat import listen
from components.ranges import CountFromZero, Range
from core import beat
from training.launch.machines import Machines
from training.options.schema import Options, errors_of, recipe_of

# In each process of a run core's watch for hangs hears what components do.
listen(beat)


def new_run_dir(recipe: str) -> str:
    """Where a run of a recipe goes that was not told where: runs/<recipe>-<time>."""
    return f"runs/{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"


Seed = Annotated[int, Range(least=0, most=2**63 - 1)]
"""Generators of random numbers take no larger ones."""
Steps = Annotated[int, Range(least=1, also=-1)]
"""Between two of something; -1 has a meaning of its own."""


@dataclass(kw_only=True)
class RunOptions(Options):
    """Options of every run, whatever it trains."""

    run_dir: str = ""
    """Folder of everything that the run writes. Default: runs/<recipe>-<time>."""
    seed: Seed = 42
    """Fixes the order of the prompts and the samples."""
    dry_run: bool = False
    """Print what would run where, as JSON, and start nothing."""
    assume_devices: str | None = None
    """With dry_run: plan for other machines than this one, written as GPUs of each x machines, 8x2, with a GPU's memory
    8x2x80GB; or as 8, for as many machines as the run asks for. Faults of models and data that are here are notes."""
    print_config: bool = False
    """Print the whole configuration as YAML, and start nothing."""
    resume: str = "auto"
    """`auto` resumes from the latest checkpoint of run_dir if there is one, a path from that step, run or folder of
    checkpoints; `none` begins anew, in a folder without a run."""
    backend: Literal["ray", "local"] = "ray"
    """Where the roles live: each in a process of its own, or all in this one, one at a time (for breakpoints)."""
    max_restarts: CountFromZero = 3
    """How often all starts again from the latest checkpoint when a rank dies, and how often dead engines of a role are
    replaced before that; those that die together, as with their node, count once."""
    stall_timeout: float = 1800.0
    """Seconds without a sign of progress after which a process is ended as hung; 0: never."""
    placement_timeout: float = 30.0
    """Seconds to wait for free resources, at the start and for the replacement of an engine; longer than an
    autoscaler needs to add a node, if there is one."""

    def __post_init__(self) -> None:
        if not self.run_dir:
            self.run_dir = new_run_dir(recipe_of(type(self)))
        super().__post_init__()

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.assume_devices is not None:
            yield from errors_of("", Machines.parse, self.assume_devices)
            if not (self.dry_run or self.print_config):
                yield f"assume_devices={self.assume_devices} is for a plan alone; set dry_run as well, or leave it out"
