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
    """Generate ahead of training. Needs devices of their own for both."""
    queue_size: CountFromZero = active_when(1, enabled=True)
    """How many batches are generated ahead; so many versions behind may a batch's weights be. 0: none, as without."""
    partial_rollout: bool = of_plugin("partial_rollouts", False)
    """Bring new weights to the engines in the middle of episodes. Otherwise an update waits until they are done."""
    in_flight_prompts: int | None = of_plugin("partial_rollouts", None)
    """Prompts in generation at the same time, more than a step's and at most twice as many: the slowest ones come in
    the next batch. Default: a step's, and a batch waits for the slowest. Needs partial_rollout."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        for name in ("partial_rollout", "in_flight_prompts"):
            if getattr(self, name) and not self.enabled:
                yield f"asynchronous.{name} without asynchronous.enabled; set that to true as well"
        if self.partial_rollout and not self.queue_size:
            yield (
                "asynchronous.partial_rollout with asynchronous.queue_size=0: nothing is generated while weights "
                "change; set queue_size=1"
            )
        if self.in_flight_prompts is not None and not self.partial_rollout:
            yield "asynchronous.in_flight_prompts needs asynchronous.partial_rollout=true; set that as well"

    def notes(self, correct: str, corrects: bool) -> list[str]:
        """What a user should know of before the run starts.

        Args:
            correct: what a user sets so that older samples are weighed by how likely they have become.
            corrects: whether they are.
        """
        if self.ahead and not corrects:
            return [
                f"responses are up to {self.most_stale} updates old, and learnt from as if new; {correct} weighs them"
            ]
        return []

    @property
    def ahead(self) -> int:
        """Batches that are generated ahead; 0 where it is not enabled."""
        return self.queue_size if self.enabled else 0

    @property
    def most_stale(self) -> int:
        """So many versions may the weights that drew a token be behind those that train on it."""
        return self.ahead + (self.in_flight_prompts is not None)

    def faults_beside(self, colocated: bool, backend: str, prompts_per_step: int, apart: str) -> Iterator[str]:
        """Why generation and training cannot continue at the same time.

        Args:
            colocated: the roles work one after the other on the same devices.
            backend: of the run.
            prompts_per_step: of the run.
            apart: what a user sets to give the roles devices of their own, as `placement.colocate=false`.
        """
        if self.ahead and colocated:
            yield (
                "asynchronous.enabled, but the roles work one after the other on the same devices, and cannot work at "
                f"the same time; set {apart}"
            )
        if self.ahead and backend == "local":
            yield "asynchronous.enabled, but backend=local runs one role at a time; set backend=ray"
        if self.in_flight_prompts and not prompts_per_step < self.in_flight_prompts <= 2 * prompts_per_step:
            yield (
                f"asynchronous.in_flight_prompts={self.in_flight_prompts}; set {prompts_per_step + 1} to "
                f"{2 * prompts_per_step}: more than the {prompts_per_step} prompts of a step, at most twice as many"
            )
