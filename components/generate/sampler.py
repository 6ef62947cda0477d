"""Interface between a rollout role and its generator: a rollout engine, or the runner of an agent's episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from components.batch import Batch
    from components.generate.config import SamplingConfig
    from components.weights.publisher import WeightHandle


class Sampler(Protocol):
    """Generator of rollouts with the weights that it received last."""

    @property
    def weight_version(self) -> int:
        """Version of the weights in use."""
        ...

    @property
    def has_weights(self) -> bool:
        """False after a `sleep` that discarded the weights."""
        ...

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Generate one rollout for each prompt; see `RolloutEngine.generate`."""
        ...

    def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        """See `RolloutEngine.receive`."""
        ...

    def check(self, probe: Any) -> dict[str, float]:
        """See `RolloutEngine.check`."""
        ...

    def metrics(self) -> dict[str, float]:
        """See `RolloutEngine.metrics`."""
        ...

    def sleep(self, level: int = 1) -> int:
        """See `RolloutEngine.sleep`."""
        ...

    def wake(self, for_weights: bool = False) -> None:
        """See `RolloutEngine.wake`."""
        ...

    def close(self) -> None:
        """Stop the threads and processes of the generator."""
        ...


@dataclass(frozen=True)
class Collected:
    """Rollouts that have finished since the last call of `collect`."""

    batch: Batch | None
    """Complete groups in the order in which they finished. The samples of a prompt are adjacent."""
    in_flight: list[int]
    """The `prompt_id` of each group that is still being generated."""


class GroupSampler(Sampler, Protocol):
    """A sampler whose rollouts stay in flight between calls."""

    def begin(self, prompts: Batch, sampling: SamplingConfig) -> None:
        """Start the rollouts of whole groups, which continue during later calls."""
        ...

    def collect(self, seconds: float) -> Collected:
        """Generate until a group has finished, for at most `seconds`."""
        ...
