"""Stored rollouts are returned as they were before the training pass."""

import torch

from components.batch import Batch
from plugins.replay.stored import generated_part


def test_columns_of_the_training_pass_are_left_out_and_the_original_mask_is_restored() -> None:
    original = torch.tensor([False, True, True])
    rejected = torch.tensor([False, True, False])
    per_token = {"tokens": torch.tensor([1, 2, 3]), "action_mask": rejected, "sampled_mask": original}
    per_token |= {name: torch.zeros(3) for name in ("logprob", "advantage", "return", "rollout_logprob")}
    per_sequence = {"reward": torch.ones(1), "shaped_reward": torch.ones(1), "staleness": torch.zeros(1)}
    rollouts = generated_part(Batch([3], per_token, per_sequence))
    assert sorted(rollouts.names) == ["action_mask", "reward", "rollout_logprob", "tokens"]
    assert torch.equal(rollouts["action_mask"], original)
