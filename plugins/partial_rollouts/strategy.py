"""Rollout strategy that fills each step from a `PartialRolloutBuffer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from plugins.partial_rollouts.buffer import PartialRolloutBuffer
from training.run.strategies import GROUPS

if TYPE_CHECKING:
    from components.batch import Batch
    from training.run.policy_run import PolicyRun
    from training.run.queue import Stateful


class PartialRollouts:
    """Keeps prompts in generation while weights change; see `RolloutStrategy`."""

    has_ended = False

    def __init__(self, run: PolicyRun) -> None:
        options = run.config.asynchronous
        self._run = run
        self._buffer = PartialRolloutBuffer(
            take=run.prompts.take,
            begin=lambda prompts, step: run.calls.begin(prompts, run.config.sampling(step)),
            collect=run.calls.collect,
            engines=run.calls.engines,
            samples=run.config.samples_per_prompt,
            # By default there are no spare prompts, so that a step waits for all of its responses.
            in_flight=options.in_flight_prompts or run.config.prompts_per_step,
            most_stale=options.most_stale,
            version=lambda: run.version,
            stopped=lambda: run.stream.ending,
            info=run.info,
        )

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last step."""
        return self._buffer.metrics

    @property
    def waiting(self) -> int:
        """See `RolloutStrategy.waiting`."""
        return len(self._buffer)

    def sources(self) -> Mapping[str, Stateful]:
        """See `RolloutStrategy.sources`."""
        return {GROUPS: self._buffer}

    def fill(self, step: int) -> Batch | None:
        """See `RolloutStrategy.fill`."""
        count = self._run.config.prompts_per_step
        with self._run.phase("generate"):
            rollouts = self._buffer.fill(step, count, count * (self._run.steps - step + 1))
        if rollouts is None:
            return None
        return self._run.score_rollouts(rollouts)
