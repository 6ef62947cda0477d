"""Rollout strategies collect the rollouts of a training step. Plug-ins provide all of them except the default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from components.batch import Batch
    from training.run.queue import Stateful


GROUPS = "groups"
"""Name of the `PartialRolloutBuffer` among the sources of the stream. Checkpoints of runs without it lack its state."""


class RolloutStrategy(Protocol):
    """Collects the rollouts of each training step. `metrics` are those of the last step.

    A plug-in provides a class of the kind "rollout strategy", which is opened with the `PolicyRun`.
    `RLOptions.rollout_strategy` names it.
    """

    metrics: Mapping[str, float]

    def fill(self, step: int) -> Batch | None:
        """Return the scored rollouts of a step, or None if a stop was requested or the data has ended."""
        ...

    @property
    def waiting(self) -> int:
        """Number of prompts that were taken from the data and whose rollouts were not returned yet."""
        ...

    @property
    def has_ended(self) -> bool:
        """True if the last step took all that the data had left."""
        ...

    def sources(self) -> Mapping[str, Stateful]:
        """Parts of the strategy that a checkpoint holds, by name."""
        ...


class WholeSteps:
    """The default strategy: the rollouts of a step are those of the next prompts."""

    waiting = 0
    has_ended = False

    def __init__(self, make: Callable[[int, int], Batch], count: int) -> None:
        """
        Args:
            make: (number of prompts, step) -> the scored rollouts of the next prompts.
            count: number of prompts of a step.
        """
        self.metrics: Mapping[str, float] = {}
        self._make = make
        self._count = count

    def fill(self, step: int) -> Batch:
        """See `RolloutStrategy.fill`."""
        return self._make(self._count, step)

    def sources(self) -> Mapping[str, Stateful]:
        """See `RolloutStrategy.sources`."""
        return {}
