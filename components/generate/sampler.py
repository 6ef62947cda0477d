"""The calls that a rollout role makes to what generates: a rollout engine, or the runner of an agent's episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from components.batch import Batch
    from components.generate.config import SamplingConfig
    from components.weights.publisher import WeightHandle


class Sampler(Protocol):
    """Generates rollouts with the weights that it has received last."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that are in use."""
        ...

    @property
    def has_weights(self) -> bool:
        """False after a sleep that dropped the weights."""
        ...

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Generate one rollout for each prompt; see `RolloutEngine.generate`."""
        ...

    def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        """See `RolloutEngine.receive`."""
        ...

    def gpu_memory(self) -> dict[str, float]:
        """See `RolloutEngine.gpu_memory`."""
        ...

    def sleep(self, level: int = 1) -> int:
        """See `RolloutEngine.sleep`."""
        ...

    def wake(self, for_weights: bool = False) -> None:
        """See `RolloutEngine.wake`."""
        ...

    def close(self) -> None:
        """End what the engine has started."""
        ...


@dataclass(frozen=True)
class Collected:
    """Rollouts that have finished since the last call."""

    batch: Batch | None
    """Whole groups, all samples of a prompt side by side, in the order in which they finished."""
    in_flight: list[int]
    """The `prompt_id` of each group that is still being generated."""


class GroupSampler(Sampler, Protocol):
    """A sampler whose rollouts stay in flight between calls."""

    def begin(self, prompts: Batch, sampling: SamplingConfig) -> None:
        """Begin the rollouts of whole groups, which continue during later calls."""
        ...

    def collect(self, seconds: float) -> Collected:
        """Continue until a group has finished, for at most `seconds`."""
        ...
