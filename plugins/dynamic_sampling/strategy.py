"""Rollout strategy that fills each step with a `DynamicSampler`."""

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
    """Replaces prompts without a learning signal. See `RolloutStrategy`."""

    waiting = 0

    def __init__(self, run: PolicyRun) -> None:
        config = run.config
        assert config.filter_range is not None, "dynamic sampling is loaded, but algorithm.filter_range is not set"
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
        """See `RolloutStrategy.sources`. The run itself saves the position in the prompts."""
        return {}

    def fill(self, step: int) -> Batch | None:
        """See `RolloutStrategy.fill`."""
        run = self._run
        rollouts = self._sampler.fill(step, run.config.prompts_per_step, lambda count: run.respond_to_next(count, step))
        # Failed rewards of replaced prompts are not reported, because nothing is trained on these prompts.
        kept_prompts = torch.empty(0)
        if rollouts is not None:
            kept_prompts = rollouts["prompt_id"]
        run.failed_rewards.keep_prompts(kept_prompts)
        return rollouts
