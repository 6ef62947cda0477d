"""What makes the algorithm: what a reward becomes, who gets the credit for it, and the two losses.

Change a line here in a copy of the folder, and it is another algorithm. `B` sequences, `N` all tokens end to end;
entry t of a per-token column is about token t.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from components.batch import Batch
from components.data.samples import compare_samples
from components.engines.causal import token_logprobs, token_values
from components.rl import advantages, correction, policy_losses
from components.rl.aggregation import LossOutput, TokenLoss, Totals, reduce_loss
from components.rl.kl import adapted_kl_coef, kl_estimate
from components.rl.masked import token_mean
from components.rl.rewards import overlong_penalty, stop_properly_penalty, token_rewards
from components.rl.value_losses import clipped_value_loss

from .config import PPOConfig

COMPARISONS = {
    "reinforce_baseline": advantages.group_mean_baseline,
    "rloo": advantages.rloo,
    "group_norm": advantages.group_norm,
    "dr_grpo": advantages.group_mean_baseline,
    "gpg": advantages.gpg,
    "grpo_passk": advantages.grpo_passk,
}
"""What becomes of the rewards of one prompt's responses. `opo` reads their lengths too; other estimators keep them."""

WHITENED = ("gae", "reinforce", "reinforce_baseline")
"""Estimators whose advantages are whitened over the whole step."""

COVARIANCE_SHARE = 2e-4
"""Of the tokens, how many clip_cov drops and kl_cov holds back."""
CLIP_COV = {"share": COVARIANCE_SHARE, "low": 1.0, "high": 5.0}
"""Between which covariances clip_cov looks for them."""
KL_COV_COEF = 1.0
"""Loss per nat that a token which kl_cov holds back moves."""


def add_advantages(experience: Batch, config: PPOConfig, kl_coef: float) -> Batch:
    """Add `shaped_reward` [B], `advantage`, `return` and, where it is asked for, `correction`, all [N], to a whole
    step's batch.
    """
    own, mask_N = config.algorithm, experience["action_mask"]
    kl_N = None
    if config.needs_reference and own.kl_in_reward:
        kl_N = kl_estimate(experience["logprob"], experience["reference_logprob"], mask_N, own.kl_estimator)
    shaped_B = shaped_rewards(experience, config)
    reward_N = token_rewards(shaped_B, kl_N, kl_coef, mask_N, experience.lengths)
    if config.needs_critic:
        value_N = experience["value"]
        advantage_N, return_N = advantages.gae(reward_N, value_N, mask_N, experience.lengths, own.gamma, own.lam)
    else:
        advantage_N = return_N = advantages.discounted_returns(reward_N, mask_N, experience.lengths, own.gamma)
    if own.estimator in WHITENED:
        advantage_N = advantages.whiten(advantage_N, mask_N, scale=own.std_norm)
    experience = experience.with_sequences(shaped_reward=shaped_B)
    experience = experience.with_tokens(advantage=advantage_N, **{"return": return_N})
    return experience.with_tokens(correction=corrections(experience, config)) if config.corrects_loss else experience


def shaped_rewards(experience: Batch, config: PPOConfig) -> Tensor:
    """[B] rewards after the penalties on length, the comparison within groups, and the cut to their range."""
    own, longest = config.algorithm, config.rollout.max_new_tokens
    reward_B, length_B = experience["reward"], experience.sum_tokens(experience["action_mask"])
    if own.overlong_buffer is not None:
        reward_B = overlong_penalty(reward_B, length_B, longest, own.overlong_buffer, own.overlong_penalty)
    if own.truncated_factor is not None:
        reward_B = stop_properly_penalty(reward_B, experience["truncated"], own.truncated_factor)
    if own.estimator == "opo":
        reward_B = advantages.opo(reward_B, length_B, experience["prompt_id"])
    elif own.estimator in COMPARISONS:
        reward_B = compare_samples(experience, reward_B, COMPARISONS[own.estimator])
    return reward_B.clamp(*own.reward_range)


def corrections(experience: Batch, config: PPOConfig) -> Tensor:
    """[N] times which each token's loss counts, for what the engine that sampled it computed otherwise."""
    columns = (experience["logprob"], experience["rollout_logprob"], experience["action_mask"], experience.lengths)
    own, (low, high) = config.algorithm, config.algorithm.correction_range
    outside = "zero" if own.correction == "icepop" else "clamp"
    weight_N = correction.importance_weights(*columns, level="token", low=low, high=high, outside=outside)
    if own.correction == "seq-mask-tis":
        weight_N *= correction.rejection_weights(*columns, level="geometric", estimator="k1", low=low, high=high)
    return weight_N


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: PPOConfig, kl_coef: float) -> LossOutput:
    """The surrogate, the KL to the reference where it is part of the loss, and the entropy's reward."""
    own, mask_N, longest = config.algorithm, micro["action_mask"], config.rollout.max_new_tokens
    output = token_logprobs(model, micro, config.rollout.temperature, with_entropy=True)
    assert output.entropy_N is not None
    weight_N = micro["correction"] if config.corrects_loss else None
    tokens = surrogate(output.logprob_N, micro, config)
    policy = reduce_loss(tokens, mask_N, micro.lengths, totals, config.aggregation, longest, weight_N)
    entropy = reduce_loss(policy_losses.entropy_loss(output.entropy_N, mask_N), mask_N, micro.lengths, totals)
    loss, metrics = policy.loss, policy.metrics | entropy.metrics | {"policy_loss": policy.loss.detach()}
    if own.entropy_coef:
        loss = loss + own.entropy_coef * entropy.loss
    if config.needs_reference and not own.kl_in_reward:
        kl_N = kl_estimate(output.logprob_N, micro["reference_logprob"], mask_N, own.kl_estimator)
        kl = token_mean(kl_N, mask_N, totals.tokens)
        loss = loss + kl_coef * kl
        metrics["kl_loss"] = kl.detach()
    return LossOutput(loss=loss, metrics=metrics)


def surrogate(logprob_N: Tensor, micro: Batch, config: PPOConfig) -> TokenLoss:
    """What each token costs, as `algorithm.policy_loss` says."""
    own = config.algorithm
    clip = {"clip_low": own.clip_low, "clip_high": own.clip_high}
    columns = (logprob_N, micro[config.old_policy], micro["advantage"], micro["action_mask"])
    match own.policy_loss:
        case "ppo":
            return policy_losses.ppo_loss(*columns, **clip, dual_clip=own.dual_clip)
        case "gspo":
            return policy_losses.gspo_loss(*columns, micro.lengths, **clip)
        case "geo_mean":
            return policy_losses.geo_mean_loss(*columns, micro.lengths, **clip)
        case "cispo":
            return policy_losses.cispo_loss(*columns, **clip)
        case "sapo":
            return policy_losses.sapo_loss(*columns)
        case "dppo_tv" | "dppo_kl" as kind:
            return policy_losses.dppo_loss(*columns, divergence="tv" if kind == "dppo_tv" else "kl", **clip)
        case "clip_cov":
            return policy_losses.clip_cov_loss(*columns, micro["marked"], **clip)
        case "kl_cov":
            return policy_losses.kl_cov_loss(*columns, micro["marked"], coef=KL_COV_COEF)
        case "reinforce":
            return policy_losses.reinforce_loss(logprob_N, micro["advantage"], micro["action_mask"])


def mark_tokens(minibatch: Batch, index: int, config: PPOConfig, step: int) -> Batch:
    """Add what a loss has to know of the whole optimizer step: clip_cov and kl_cov, the tokens that they treat apart.

    `index` counts the optimizer steps of the rollout step `step`.
    """
    if config.algorithm.policy_loss not in ("clip_cov", "kl_cov"):
        return minibatch
    mask_N = minibatch["action_mask"]
    covariance_N = policy_losses.covariances(minibatch[config.old_policy], minibatch["advantage"], mask_N)
    if config.algorithm.policy_loss == "kl_cov":
        marked_N = policy_losses.kl_cov_tokens(covariance_N, mask_N, share=COVARIANCE_SHARE)
    else:
        uniform_N = torch.from_numpy(np.random.default_rng([config.seed, step, index, 1]).random(minibatch.num_tokens))
        marked_N = policy_losses.clip_cov_tokens(covariance_N, mask_N, uniform_N, **CLIP_COV)
    return minibatch.with_tokens(marked=marked_N)


def value_loss(model: nn.Module, micro: Batch, totals: Totals, config: PPOConfig) -> LossOutput:
    """Squared error to the returns, clipped around the values of the step's start."""
    value_N, mask_N = token_values(model, micro), micro["action_mask"]
    tokens = clipped_value_loss(value_N, micro["value"], micro["return"], mask_N, clip=config.critic.value_clip)
    return reduce_loss(tokens, mask_N, micro.lengths, totals)


class AdaptedKL:
    """The weight of the KL. Where it has a target, each step beyond it weighs the KL more, and each within less."""

    def __init__(self, config: PPOConfig) -> None:
        self._own = config.algorithm
        self.coef = config.algorithm.kl_coef

    def adapt(self, experience: Batch) -> None:
        """Adapt it to the responses that a step was trained on."""
        own = self._own
        if own.kl_target is not None:
            kl_N = experience["logprob"] - experience["reference_logprob"]
            kl = float(kl_N[experience["action_mask"]].mean())
            count = len(experience)
            self.coef = adapted_kl_coef(self.coef, kl, target=own.kl_target, horizon=own.kl_horizon, samples=count)

    def state_dict(self) -> dict[str, float]:
        """Give what `load_state_dict` needs."""
        return {"coef": self.coef, "kl_coef": self._own.kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with it; one that is not adapted, or is to start elsewhere than before, is what the options say."""
        if self._own.kl_target is not None and state["kl_coef"] == self._own.kl_coef:
            self.coef = state["coef"]
