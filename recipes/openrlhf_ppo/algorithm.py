"""What makes this PPO: rewards per token, advantages by GAE, and the two losses.

Change a line here in a copy of the folder, and it is another algorithm. `B` sequences, `N` all tokens end to end;
entry t of a per-token column speaks about token t.
"""

import numpy as np
import torch
from torch import Tensor, nn

from components.batch import Batch
from components.engines.causal import token_logprobs, token_values
from components.engines.deepspeed_engine import Totals
from components.rl.advantages import gae, whiten
from components.rl.kl import kl_estimate
from components.rl.masked import token_mean
from components.rl.policy_losses import LossOutput, ppo_loss
from components.rl.rewards import token_rewards
from components.rl.value_losses import clipped_value_loss

from .config import PPOConfig


def add_advantages(experience: Batch, config: PPOConfig) -> Batch:
    """Add `advantage` and `return`, both [N], to a whole step's batch."""
    mask_N = experience["action_mask"]
    kl_N = None
    if config.needs_reference:
        kl_N = kl_estimate(experience["logprob"], experience["reference_logprob"], config.kl_estimator)
    reward_N = token_rewards(experience["reward"], kl_N, config.kl_in_reward, mask_N, experience.lengths)
    advantage_N, return_N = gae(reward_N, experience["value"], mask_N, experience.lengths, config.gamma, config.lambd)
    advantage_N = whiten(advantage_N, mask_N, scale=not config.no_advantage_std_norm)
    return experience.with_tokens(advantage=advantage_N, **{"return": return_N})


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: PPOConfig) -> LossOutput:
    """Clipped surrogate, plus the KL to the reference where it is part of the loss."""
    mask_N = micro["action_mask"]
    output = token_logprobs(model, micro, config.temperature, with_entropy=True)
    assert output.entropy_N is not None
    loss = ppo_loss(
        output.logprob_N,
        micro["logprob"],
        micro["advantage"],
        mask_N,
        totals.tokens,
        clip_low=config.eps_clip,
        clip_high=config.eps_clip,
    )
    metrics = loss.metrics | {"entropy": token_mean(output.entropy_N.detach(), mask_N, totals.tokens)}
    total = loss.loss
    if config.needs_reference and config.use_kl_loss:
        kl_N = kl_estimate(output.logprob_N, micro["reference_logprob"], config.kl_estimator)
        kl = token_mean(kl_N, mask_N, totals.tokens)
        total = total + config.init_kl_coef * kl
        metrics["kl_loss"] = kl.detach()
    return LossOutput(loss=total, metrics=metrics)


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
