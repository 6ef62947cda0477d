"""Rollouts whose reward failed are dropped, counted and saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from components.batch import Batch
from components.rewards.errors import RewardError
from tests.messages import says
from training.run.failed_rewards import FailedRewards


class Saved:
    """Replacement of the tracker that records saved batches."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[int], str]] = []

    def rollouts(self, step: int, batch: Batch, name: str) -> None:
        self.batches.append((step, batch["prompt_id"].tolist(), name))


def rollouts(prompt_ids: list[int], failed: list[float]) -> Batch:
    ids, failed_B = torch.tensor(prompt_ids), torch.tensor(failed)
    return Batch([1] * len(ids), {"tokens": ids}, {"prompt_id": ids, "reward_failed": failed_B})


def failed_rewards(minimum: int = 1) -> tuple[FailedRewards, list[str]]:
    said: list[str] = []
    return FailedRewards(lambda _: minimum, "responses", said.append), said


def test_failed_rollouts_leave_the_batch_and_are_saved_with_their_step() -> None:
    failures, said = failed_rewards()
    tracker: Any = Saved()
    rewarded = failures.drop(rollouts([1, 1, 2, 2], [0, 1, 0, 0]))
    assert rewarded["prompt_id"].tolist() == [1, 2, 2]
    failed = failures.take(rewarded)
    assert failed is not None
    failures.record(failed, rewarded, tracker, 3)
    assert failures.of_step is failed
    assert [(step, ids) for step, ids, _ in tracker.batches] == [(3, [1])]
    assert Path(tracker.batches[0][2]).parts[0] == "failed"
    assert said[0].startswith("step 3: 1 of 4 responses have no reward and are excluded from training.")
    assert failures.take(rewarded) is None
    failures.record(None, rewarded, tracker, 4)
    assert failures.of_step is None
    assert len(said) == 1


def test_rollouts_of_replaced_prompts_are_not_counted() -> None:
    failures, _ = failed_rewards()
    rewarded = failures.drop(rollouts([1, 1, 2, 2], [0, 1, 0, 1]))
    failures.keep_prompts(torch.tensor([2]))
    failed = failures.take(rewarded)
    assert failed is not None
    assert failed["prompt_id"].tolist() == [2]


def test_too_few_rollouts_with_a_reward_are_an_error_with_both_numbers() -> None:
    failures, _ = failed_rewards(minimum=3)
    rewarded = failures.drop(rollouts([1, 1, 2], [0, 1, 0]))
    with pytest.raises(RewardError, match=says("2 of 3 responses", "need 3")):
        failures.take(rewarded)
    # A step with two rollouts and no failure is accepted here.
    assert failures.take(failures.drop(rollouts([1, 2], [0, 0]))) is None
