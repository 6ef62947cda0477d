"""The rollout strategy that fills each step by a `DynamicSampler`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from plugins.dynamic_sampling.sampler import DynamicSampler

if TYPE_CHECKING:
    from components.batch import Batch
    from training.run.policy_run import PolicyRun
    from training.run.queue import Stateful


class DynamicSampling:
    """Replaces prompts that teach nothing; see `RolloutStrategy`."""

    waiting = 0

    def __init__(self, run: PolicyRun) -> None:
        config = run.config
        assert config.filter_range is not None, "the options ask for no dynamic sampling"
        self._run = run
        self._sampler = DynamicSampler(
            prompts=run.prompts,
            bounds=config.filter_range,
            option=config.FILTER_OPTION,
            passes=config.data.epochs,
            minimum=config.placement.actor_ranks or 1,
            stopped=lambda: run.trainer.stop_requested,
            info=run.info,
        )

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last step."""
        return self._sampler.metrics

    @property
    def has_ended(self) -> bool:
        """See `RolloutStrategy.has_ended`."""
        return self._sampler.ended

    def sources(self) -> Mapping[str, Stateful]:
        """See `RolloutStrategy.sources`; the prompts are saved by the run."""
        return {}

    def fill(self, step: int) -> Batch | None:
        """See `RolloutStrategy.fill`."""
        run = self._run
        rollouts = self._sampler.fill(step, run.config.prompts_per_step, lambda count: run.respond_to_next(count, step))
        # A prompt that was replaced is not trained on, and neither are its failed rewards counted.
        run.failed_rewards.keep_prompts(torch.empty(0) if rollouts is None else rollouts["prompt_id"])
        return rollouts
