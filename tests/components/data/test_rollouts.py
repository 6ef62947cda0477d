"""What is said of a step's answers."""

import math

import pytest
import torch

from components.batch import Batch
from components.data.rollouts import check_version, rollout_metrics


def answers() -> Batch:
    """Two prompts of one token, two answers each, of 1, 2, 1 and 1 tokens."""
    mask = [False, True, False, True, True, False, True, False, True]
    return Batch(
        [2, 3, 2, 2],
        {
            "tokens": torch.arange(9),
            "action_mask": torch.tensor(mask),
            # Twice as likely for the engine in one of five tokens; what is masked is not read.
            "logprob": torch.tensor([9.0, -1.0, math.nan, -1.0, -1.0, 0.0, -1.0, 0.0, -1.0]),
            "rollout_logprob": torch.tensor([0.0, math.log(2) - 1, 0.0, -1.0, -1.0, 0.0, -1.0, 0.0, -1.0]),
        },
        {
            "reward": torch.tensor([1.0, 3.0, 2.0, 2.0]),
            "score": torch.tensor([0.0, 1.0, 1.0, 1.0]),
            "shaped_reward": torch.tensor([-1.0, 1.0, 0.0, 0.0]),
            "reward_failed": torch.tensor([0.0, 0.0, 1.0, 0.0]),
            "truncated": torch.tensor([False, True, False, False]),
            "prompt_id": torch.tensor([7, 7, 9, 9]),
            "log_length": torch.tensor([1.0, 2.0, 1.0, 1.0]),
            "weight_version": torch.tensor([4, 4, 3, 4]),
        },
    )


def test_a_step_is_described_by_hand() -> None:
    found = rollout_metrics(answers(), 0.6, 2.0)
    assert found["reward/reward"] == 2.0
    assert found["reward/score"] == 0.75
    assert found["reward/failed"] == 1.0
    assert found["reward/length"] == 1.25
    # Rewards 1 and 3 have the deviation sqrt(2), 2 and 2 none.
    assert found["reward/group_std"] == pytest.approx(math.sqrt(2) / 2)
    assert found["reward/zero_variance_share"] == 0.5
    assert found["rollout/response_length"] == 1.25
    assert found["rollout/truncated_share"] == 0.25
    assert found["rollout/logprob_gap_max"] == pytest.approx(math.log(2))
    # One token in five, of ratio 1/2.
    assert found["rollout/outside_share"] == pytest.approx(0.2)
    assert found["rollout/mismatch_kl"] == pytest.approx(math.log(2) / 5)


def test_prompts_with_one_answer_have_no_groups() -> None:
    assert "reward/group_std" not in rollout_metrics(answers().select([0, 2]))


def test_an_engine_that_missed_an_update_is_found() -> None:
    check_version(answers().select([0, 1]), 4)
    with pytest.raises(
        RuntimeError, match=r"1 answers were sampled from weights of version \[3\], but the trainer is at"
    ):
        check_version(answers(), 4)
