"""Rollouts whose reward failed: dropped before training, counted, and saved in `failed/` of the run folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from components.batch import Batch
from components.data.samples import drop_unrewarded
from components.rewards.errors import RewardError
from training.tracking.tracker import UNREWARDED

if TYPE_CHECKING:
    from training.tracking.tracker import Tracker


class FailedRewards:
    """Drops the rollouts whose reward failed. No other code reads the column `reward_failed` of a training step.

    The thread that makes rollouts calls `drop` and `take`; the loop that trains on them calls `record`.
    """

    def __init__(self, minimum: Callable[[int], int], noun: str, info: Callable[[str], None]) -> None:
        """
        Args:
            minimum: number of rollouts that the optimizer steps of all ranks need, given the number that have a reward.
            noun: name of the rollouts in messages, such as "responses".
            info: prints a line for the user.
        """
        self._minimum = minimum
        self._noun = noun
        self._info = info
        self._dropped: list[Batch] = []
        self.of_step: Batch | None = None
        """Rollouts without a reward of the step that is being trained on."""

    def drop(self, rollouts: Batch) -> Batch:
        """Return the rollouts that have a reward, and keep the others for `take`."""
        rewarded, failed = split_failed(rollouts)
        if failed is not None:
            self._dropped.append(failed)
        return rewarded

    def keep_prompts(self, prompt_ids: Tensor) -> None:
        """Discard the failed rollouts of other prompts, because a rollout strategy has replaced those prompts."""
        self._dropped = [failed.select(torch.isin(failed["prompt_id"], prompt_ids)) for failed in self._dropped]

    def take(self, rollouts: Batch | None) -> Batch | None:
        """Return the rollouts that were dropped since the last call, or None.

        Args:
            rollouts: rollouts of a step that have a reward, or None if the step was abandoned.

        Raises:
            RewardError: there are fewer `rollouts` than the optimizer steps need.
        """
        dropped = [failed for failed in self._dropped if len(failed)]
        self._dropped = []
        if rollouts is None or not dropped:
            return None
        failed = Batch.concat(dropped)
        # Checked here, in the thread that generates: the loop then raises the error before it trains on this batch.
        self.check(rollouts, failed)
        return failed

    def check(self, rewarded: Batch, failed: Batch) -> None:
        """Raise RewardError if too few rollouts are left for the optimizer steps."""
        # Fewer would leave a rank without a response, and the others would wait for it in a collective.
        minimum = self._minimum(len(rewarded))
        if len(rewarded) < minimum:
            raise RewardError(
                f"{len(rewarded)} of {len(rewarded) + len(failed)} {self._noun} have a reward; the optimizer steps of "
                f"all ranks need {minimum}"
            )

    def record(self, failed: Batch | None, rewarded: Batch, tracker: Tracker, step: int) -> None:
        """Count the failed rollouts of the step that is being trained on, and save them."""
        self.of_step = failed
        if failed is None:
            return
        tracker.rollouts(step, failed, UNREWARDED)
        what = f"{len(failed)} of {len(failed) + len(rewarded)} {self._noun}"
        self._info(
            f"step {step}: {what} have no reward and are excluded from training. They are saved in "
            f"{UNREWARDED.format(step=step)} of the run."
        )


def split_failed(rollouts: Batch) -> tuple[Batch, Batch | None]:
    """Return the rollouts that have a reward, and those whose reward failed, or None if there are none."""
    rewarded = drop_unrewarded(rollouts)
    if len(rewarded) == len(rollouts):
        return rewarded, None
    return rewarded, rollouts.select(rollouts["reward_failed"] > 0)
