"""Options of generation ahead of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from components.ranges import CountFromZero
from training.options.schema import Options, active_when, of_plugin


@dataclass(kw_only=True)
class AsyncOptions(Options, group="asynchronous"):
    """Generation ahead of training, with slightly older weights."""

    enabled: bool = False
    """Generate the next batches while the current one is trained on. Needs separate devices for both."""
    queue_size: CountFromZero = active_when(1, enabled=True)
    """Number of batches generated ahead of training, which is also the maximum staleness of a batch in weight versions.
    0 generates nothing ahead."""
    partial_rollout: bool = of_plugin("partial_rollouts", False)
    """Update the weights of the engines in the middle of episodes. By default an update waits until running episodes
    end."""
    in_flight_prompts: int | None = of_plugin("partial_rollouts", None)
    """Number of prompts in generation at the same time: more than prompts_per_step, at most twice as many. The slowest
    prompts move to the next batch. Default: prompts_per_step, so that a batch waits for its slowest prompt. Needs
    partial_rollout."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        for name in ("partial_rollout", "in_flight_prompts"):
            if getattr(self, name) and not self.enabled:
                yield f"asynchronous.{name} needs asynchronous.enabled=true; set that as well"
        if self.partial_rollout and not self.queue_size:
            yield (
                "asynchronous.partial_rollout=true with asynchronous.queue_size=0: nothing is generated during weight "
                "updates; set queue_size=1"
            )
        if self.in_flight_prompts is not None and not self.partial_rollout:
            yield "asynchronous.in_flight_prompts needs asynchronous.partial_rollout=true; set that as well"

    def notes(self, correct: str, corrects: bool) -> list[str]:
        """Return notes for the user before the run starts.

        Args:
            correct: option and value that weight older samples by importance sampling.
            corrects: True if that option is set.
        """
        if self.ahead and not corrects:
            return [f"training uses responses up to {self.most_stale} updates old as if they were new; set {correct}"]
        return []

    @property
    def ahead(self) -> int:
        """Number of batches generated ahead of training; 0 if disabled."""
        return self.queue_size if self.enabled else 0

    @property
    def most_stale(self) -> int:
        """Maximum staleness of a token: versions between the weights that sampled it and those that train on it."""
        # One more, because the slowest prompts move to the next batch with the tokens that they have.
        return self.ahead + (self.in_flight_prompts is not None)
