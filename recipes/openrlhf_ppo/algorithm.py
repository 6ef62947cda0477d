"""What makes the algorithm: what a reward becomes, who gets the credit for it, and the two losses.

Change a line here in a copy of the folder, and it is another algorithm. `B` sequences, `N` all tokens end to end;
entry t of a per-token column speaks about token t.
"""

import numpy as np
import torch
from torch import Tensor, nn

from components.batch import Batch
from components.engines.causal import token_logprobs, token_values
from components.engines.deepspeed_engine import Totals
from components.rl.advantages import (
    discounted_returns,
    gae,
    group_mean_baseline,
    group_norm,
    leave_one_out,
    whiten,
)
from components.rl.kl import kl_estimate
from components.rl.masked import token_mean
from components.rl.policy_losses import LossOutput, ppo_loss
from components.rl.rewards import overlong_penalty, stop_properly_penalty, token_rewards
from components.rl.value_losses import clipped_value_loss

from .config import PPOConfig

COMPARISONS = {
    "reinforce_baseline": group_mean_baseline,
    "rloo": leave_one_out,
    "group_norm": group_norm,
    "dr_grpo": group_mean_baseline,
}
"""What becomes of the rewards of one prompt's answers. The other estimators leave them as they are."""

WHITENED = ("gae", "reinforce", "reinforce_baseline")
"""Estimators whose advantages are whitened over the whole step."""


def add_advantages(experience: Batch, config: PPOConfig) -> Batch:
    """Add `shaped_reward` [B], `advantage` and `return`, both [N], to a whole step's batch."""
    mask_N = experience["action_mask"]
    kl_N = None
    if config.needs_reference:
        kl_N = kl_estimate(experience["logprob"], experience["reference_logprob"], config.kl_estimator)
    shaped_B = shaped_rewards(experience, config)
    reward_N = token_rewards(shaped_B, kl_N, config.kl_in_reward, mask_N, experience.lengths)
    if config.needs_critic:
        value_N = experience["value"]
        advantage_N, return_N = gae(reward_N, value_N, mask_N, experience.lengths, config.gamma, config.lambd)
    else:
        advantage_N = return_N = discounted_returns(reward_N, mask_N, experience.lengths, config.gamma)
    if config.advantage_estimator in WHITENED:
        advantage_N = whiten(advantage_N, mask_N, scale=not config.no_advantage_std_norm)
    experience = experience.with_sequences(shaped_reward=shaped_B)
    return experience.with_tokens(advantage=advantage_N, **{"return": return_N})


def shaped_rewards(experience: Batch, config: PPOConfig) -> Tensor:
    """[B] rewards after the penalties on length, the comparison within groups, and the cut to their range."""
    reward_B = experience["reward"]
    if config.overlong_buffer_len is not None:
        length_B, factor = response_lengths(experience), config.overlong_penalty_factor
        reward_B = overlong_penalty(reward_B, length_B, config.generate_max_len, config.overlong_buffer_len, factor)
    if config.stop_properly_penalty_coef is not None:
        reward_B = stop_properly_penalty(reward_B, experience["truncated"], config.stop_properly_penalty_coef)
    compare = COMPARISONS.get(config.advantage_estimator)
    if compare is not None:
        reward_B = compare(reward_B, experience["prompt_id"])
    return reward_B.clamp(*config.reward_clip_range)


def response_lengths(samples: Batch) -> Tensor:
    """[B] tokens that the policy produced."""
    return torch.zeros(len(samples), dtype=torch.int64).index_add(
        0, samples.sequence_ids, samples["action_mask"].to(torch.int64)
    )


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: PPOConfig) -> LossOutput:
    """Clipped surrogate, the KL to the reference where it is part of the loss, and the entropy's reward."""
    mask_N = micro["action_mask"]
    output = token_logprobs(model, micro, config.temperature, with_entropy=True)
    assert output.entropy_N is not None
    low, high = config.clip_low_high
    surrogate = ppo_loss(
        output.logprob_N, micro["logprob"], micro["advantage"], mask_N, totals.tokens, clip_low=low, clip_high=high
    )
    loss, metrics = surrogate.loss, dict(surrogate.metrics)
    if config.advantage_estimator == "dr_grpo":
        # Dr. GRPO divides by a constant, so that a token's weight does not depend on how long the answers are.
        loss = loss * (totals.tokens / (totals.sequences * config.generate_max_len))
    entropy = token_mean(output.entropy_N, mask_N, totals.tokens)
    metrics["entropy"] = entropy.detach()
    if config.entropy_loss_coef:
        loss = loss - config.entropy_loss_coef * entropy
    if config.needs_reference and config.use_kl_loss:
        kl_N = kl_estimate(output.logprob_N, micro["reference_logprob"], config.kl_estimator)
        kl = token_mean(kl_N, mask_N, totals.tokens)
        loss = loss + config.init_kl_coef * kl
        metrics["kl_loss"] = kl.detach()
    return LossOutput(loss=loss, metrics=metrics)


def value_loss(model: nn.Module, micro: Batch, totals: Totals, config: PPOConfig) -> LossOutput:
    """Squared error to the returns, clipped around the values of the step's start."""
    value_N = token_values(model, micro)
    return clipped_value_loss(
        value_N, micro["value"], micro["return"], micro["action_mask"], totals.tokens, config.value_clip
    )


def minibatches(experience: Batch, config: PPOConfig, step: int) -> list[Tensor]:
    """Indices of each optimizer step of one rollout step, in order: epochs shuffled by (seed, step, epoch)."""
    order: list[Tensor] = []
    for epoch in range(config.max_epochs):
        shuffled = np.random.default_rng([config.seed, step, epoch]).permutation(len(experience))
        order += torch.from_numpy(shuffled).split(config.train_batch_size)
    return order
