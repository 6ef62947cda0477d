"""`PolicyRun` with verl's rows, rewards, validation and metric names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.run.policy_run import MakeRollouts, PolicyRun

from .config import VerlPPOConfig
from .metrics import experience_metrics, heldout_metrics, performance, renamed
from .remote_call import VerlCalls
from .reward import RewardManager

if TYPE_CHECKING:
    from components.batch import Batch
    from core import BaseTrainer
    from training.run.queue import Stateful

SHOWN = (
    "reward/score",
    "eval/score",
    "eval/score_greedy",
    "val-core/",
    "response_length/mean",
    "actor/ppo_kl",
    "actor/entropy",
    "timing_s/step",
)
"""Metrics of a step that are printed in the terminal."""


class VerlRun(PolicyRun):
    """See `PolicyRun`."""

    config: VerlPPOConfig  # pyright: ignore[reportIncompatibleVariableOverride] (set once)

    def __init__(self, trainer: BaseTrainer, config: VerlPPOConfig, parts: Mapping[str, Stateful]) -> None:
        """
        Args:
            trainer: trainer of the run, which has the worker groups.
            config: configuration of the run.
            parts: further state of the trainer that checkpoints hold, by name.
        """
        calls = VerlCalls(trainer, config)
        super().__init__(trainer, config, Path(__file__).parent, calls=calls, shown=SHOWN, parts=parts)

    def close(self) -> None:
        """See `PolicyRun.close`."""
        self.manager.close()
        super().close()

    # --- data and rewards

    def _read_rows(self, heldout: bool = False) -> list[dict[str, Any]]:
        return self.config.rows(heldout)

    def _open_reward(self) -> None:
        self.manager = RewardManager(self.config, self.tokenizer, self.info)

    def add_rewards(self, rollouts: Batch, heldout: bool = False) -> Batch:  # noqa: ARG002 - the same for both
        """Add `reward` and `score`, computed by the reward manager."""
        return self.manager(rollouts, self.step)

    # --- validation

    def validate(self, make_rollouts: MakeRollouts) -> None:
        """Evaluate the policy without training, log the metrics, and end the run (evaluate_only)."""
        self._make_rollouts = make_rollouts
        self.tracker.log(self.step, self.evaluation.at_step(self.step))
        self.tracker.update_summary(score=self.evaluation.finish(self.step))
        self.info("nothing was trained (evaluate_only)")
        self.close()

    def _evaluate(self) -> dict[str, float]:
        began = time.monotonic()
        metrics = super()._evaluate()
        return metrics | {"timing_s/testing": time.monotonic() - began}

    # --- metrics

    def measure(self, experience: Batch) -> dict[str, float]:
        """See `PolicyRun.measure`."""
        took = renamed(self.count(experience))
        metrics = experience_metrics(experience, self.config, self.failed_rewards.of_step) | self.checkpoints.metrics
        metrics |= took | self.stream.metrics | performance(experience, took, self.config.placement.actor_ranks or 1)
        return metrics | {"training/global_step": float(self.step), "training/epoch": float(self.prompts.epoch)}

    def rename(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics under verl's names."""
        return renamed(metrics)

    def describe_heldout(self, rollouts: Batch) -> Mapping[str, float]:
        """Return `val-core/...` and `val-aux/...`; see `heldout_metrics`."""
        return heldout_metrics(rollouts)
