"""What makes the algorithm: what a reward becomes, who gets the credit for it, and the two losses, each by verl's name.

Change a line here in a copy of the folder, and it is another algorithm. `B` sequences, `N` all tokens end to end;
entry t of a per-token column is about token t.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from components.batch import Batch
from components.data.samples import compare_samples, main_branches, shuffled_minibatches
from components.engines.causal import token_logprobs, token_values
from components.rl import advantages, correction, policy_losses
from components.rl.aggregation import LossOutput, TokenLoss, Totals, reduce_loss
from components.rl.kl import KLKind, adapted_kl_coef, kl_estimate
from components.rl.masked import chosen, sequence_means, spread, token_mean
from components.rl.rewards import token_rewards
from components.rl.value_losses import clipped_value_loss

from .config import VerlPPOConfig

EPSILON = 1e-6
"""What GRPO adds to the deviation of a group."""
KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""Estimators that have two names, and their other ones."""
LEVELS: dict[str, correction.Level] = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}
"""Over what rollout_rs measures."""
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose advantages are whitened over the whole step."""


def add_advantages(experience: Batch, config: VerlPPOConfig, kl_coef: float) -> Batch:
    """Add `shaped_reward` [B], `advantage`, `return` and, where it is asked for, `correction`, all [N], to a whole
    step's batch. Tokens that `rollout_rs` rejects are taken out of its `action_mask`, when their responses have been
    rewarded and compared; `sampled_mask` is what it was.
    """
    own, mask_N, lengths_B = config.algorithm, experience["action_mask"], experience.lengths
    kl_N = kl_of(experience, config) if own.use_kl_in_reward else None
    reward_N = token_rewards(experience["reward"], kl_N, kl_coef, mask_N, lengths_B)
    total_B = experience.sum_tokens(reward_N)
    experience = experience.with_sequences(shaped_reward=total_B)
    if own.adv_estimator == "gae":
        advantage_N, return_N = advantages.gae(reward_N, experience["value"], mask_N, lengths_B, own.gamma, own.lam)
    elif own.adv_estimator == "reinforce_plus_plus":
        advantage_N = return_N = advantages.discounted_returns(reward_N, mask_N, lengths_B, own.gamma)
    elif own.adv_estimator == "remax":
        advantage_N, return_N = advantages.remax(reward_N, experience["greedy_reward"], mask_N, lengths_B)
    else:
        worth_B = compared(experience, total_B, config)
        advantage_N = return_N = chosen(mask_N, spread(worth_B, lengths_B, len(mask_N)))
    experience = correct(experience, config)
    if own.adv_estimator in WHITENED:
        advantage_N = advantages.whiten(advantage_N, experience["action_mask"])
    return experience.with_tokens(advantage=chosen(experience["action_mask"], advantage_N), **{"return": return_N})


def compared(experience: Batch, reward_B: Tensor, config: VerlPPOConfig) -> Tensor:
    """[B] what rewards are worth beside those of the same prompt's other responses."""
    own = config.algorithm
    name = own.adv_estimator.removesuffix("_vectorized")
    mains = main_branches(experience)
    normalise: Callable[[Tensor, Tensor], Tensor] = partial(advantages.group_norm, epsilon=EPSILON)

    def opo(reward_B: Tensor, group_B: Tensor) -> Tensor:
        return advantages.opo(reward_B, mains.sum_tokens(mains["action_mask"]), group_B)

    def gdpo(_: Tensor, group_B: Tensor) -> Tensor:
        keys = own.gdpo_reward_keys
        logged = [name.removeprefix("log_") for name in mains.names if name.startswith("log_")]
        if missing := [key for key in keys if key not in logged]:
            raise ValueError(
                f"algorithm.gdpo_reward_keys has {', '.join(missing)}, but of numbers the reward function returns "
                f"{', '.join(logged) or 'none beside its score'}; name some of these, or return what is missing"
            )
        reward_BK = torch.stack([mains[f"log_{key}"] for key in keys], 1)
        return advantages.gdpo(reward_BK, group_B, torch.tensor(own.gdpo_reward_weights or [1.0] * len(keys)), EPSILON)

    comparisons = {
        "opo": opo,
        "gdpo": gdpo,
        "grpo": normalise if own.norm_adv_by_std_in_grpo else advantages.group_mean_baseline,
        "grpo_passk": partial(advantages.grpo_passk, divide_by_std=own.norm_adv_by_std_in_grpo),
        "reinforce_plus_plus_baseline": advantages.group_mean_baseline,
        "rloo": advantages.rloo,
        "gpg": partial(advantages.gpg, scale=own.f_norm),
    }
    return compare_samples(experience, reward_B, comparisons[name])


def kl_of(experience: Batch, config: VerlPPOConfig) -> Tensor:
    """[N] estimates of the KL to the reference, as they come off the reward."""
    columns = (experience[old_logprob(config)], experience["reference_logprob"], sampled(experience))
    return kl_estimate(*columns, kl_kind(config.algorithm.kl_penalty))


def sampled(experience: Batch) -> Tensor:
    """[N] True where the policy produced the token, also where it is not learnt from."""
    return experience["sampled_mask" if "sampled_mask" in experience else "action_mask"]


def kl_kind(name: str) -> KLKind:
    """Our name of an estimator."""
    plain = name.removesuffix("+")
    return cast(KLKind, KL_NAMES.get(plain, plain) + "+" * name.endswith("+"))


def correct(experience: Batch, config: VerlPPOConfig) -> Batch:
    """Without the tokens that rollout_rs rejects, and with the weights `correction` [N] that rollout_is asks for."""
    own, mask_N = config.algorithm.rollout_correction, experience["action_mask"]
    if not (own.rollout_is or own.rollout_rs):
        return experience
    columns = (experience["logprob"], experience["rollout_logprob"], mask_N, experience.lengths)
    if own.rollout_is:
        low, high, outside = own.weight_bounds
        weight_N = correction.importance_weights(*columns, level=own.rollout_is, low=low, high=high, outside=outside)
        if own.rollout_is_batch_normalize:
            weight_N = weight_N / weight_N[mask_N].mean().clamp(min=1e-8)
        experience = experience.with_tokens(correction=weight_N)
    for level, estimator, low, high in own.rejections:
        kept_N = correction.rejection_weights(*columns, level=LEVELS[level], estimator=estimator, low=low, high=high)
        mask_N = mask_N & (kept_N > 0)
    if not bool(mask_N.any()):
        raise ValueError(
            f"algorithm.rollout_correction.rollout_rs={own.rollout_rs} rejects every token of a step; raise "
            "rollout_rs_threshold, or look for what the engine that samples computes otherwise (rollout_corr/kl)"
        )
    if not own.rollout_rs:
        return experience
    return experience.with_tokens(action_mask=mask_N, sampled_mask=experience["action_mask"])


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: VerlPPOConfig) -> LossOutput:
    """The surrogate, less the entropy's reward, and with the KL to the reference where it is part of the loss."""
    own, mask_N = config.actor_rollout_ref.actor, micro["action_mask"]
    output = token_logprobs(model, micro, config.actor_rollout_ref.rollout.temperature, with_entropy=True)
    assert output.entropy_N is not None
    mean = partial(
        reduce_loss,
        mask_N=mask_N,
        lengths_B=micro.lengths,
        totals=totals,
        aggregation=own.loss_agg_mode,
        max_length=own.loss_scale_factor or config.data.max_response_length,
    )
    weight_N = micro["correction"] if config.algorithm.rollout_correction.rollout_is else None
    policy = mean(surrogate(output.logprob_N, micro, config), weight_N=weight_N)
    entropy = mean(policy_losses.entropy_loss(output.entropy_N, mask_N))
    loss, metrics = policy.loss, policy.metrics | entropy.metrics | {"policy_loss": policy.loss.detach()}
    if own.entropy_coeff:
        loss = loss + own.entropy_coeff * entropy.loss
    if own.use_kl_loss:
        kl_N = kl_estimate(output.logprob_N, micro["reference_logprob"], mask_N, kl_kind(own.kl_loss_type))
        kl = mean(TokenLoss(kl_N, {}))
        loss = loss + own.kl_loss_coef * kl.loss
        metrics["kl_loss"] = kl.loss.detach()
    if config.algorithm.rollout_correction.bypass_mode:  # else another pass has measured it
        gap_N = (output.logprob_N.detach() - micro["rollout_logprob"]).abs()
        metrics["engine_gap"] = token_mean(gap_N, mask_N, totals.tokens)
    return LossOutput(loss=loss, metrics=metrics)


def surrogate(logprob_N: Tensor, micro: Batch, config: VerlPPOConfig) -> TokenLoss:
    """What each token costs, as `policy_loss.loss_mode` says."""
    own = config.actor_rollout_ref.actor
    clip = {"clip_low": own.clip_low, "clip_high": own.clip_high}
    columns = (logprob_N, micro[old_logprob(config)], micro["advantage"], micro["action_mask"])
    losses: dict[str, Callable[[], TokenLoss]] = {
        "vanilla": lambda: policy_losses.ppo_loss(*columns, **clip, dual_clip=own.clip_ratio_c),
        "gspo": lambda: policy_losses.gspo_loss(*columns, micro.lengths, **clip),
        "geo_mean": lambda: policy_losses.geo_mean_loss(*columns, micro.lengths, **clip),
        "cispo": lambda: policy_losses.cispo_loss(*columns, **clip),
        "sapo": lambda: policy_losses.sapo_loss(*columns, tau_positive=own.tau_pos, tau_negative=own.tau_neg),
        "dppo_tv": lambda: policy_losses.dppo_loss(*columns, divergence="tv", **clip),
        "dppo_kl": lambda: policy_losses.dppo_loss(*columns, divergence="kl", **clip),
        "clip_cov": lambda: policy_losses.clip_cov_loss(*columns, micro["marked"], **clip),
        "kl_cov": lambda: policy_losses.kl_cov_loss(*columns, micro["marked"], coef=own.policy_loss.ppo_kl_coef),
        "gpg": lambda: policy_losses.reinforce_loss(logprob_N, micro["advantage"], micro["action_mask"]),
    }
    return losses[own.policy_loss.loss_mode]()


def old_logprob(config: VerlPPOConfig) -> str:
    """The column with the log-probabilities that the ratio is taken to: of the policy before the step, or, in bypass
    mode, of the engine that sampled.
    """
    return "rollout_logprob" if config.algorithm.rollout_correction.bypass_mode else "logprob"


def mark_tokens(minibatch: Batch, index: int, config: VerlPPOConfig, step: int) -> Batch:
    """Add what a loss has to know of the whole optimizer step: clip_cov and kl_cov, the tokens that they treat apart.

    `index` counts the optimizer steps of the rollout step `step`.
    """
    own = config.actor_rollout_ref.actor.policy_loss
    if own.loss_mode not in ("clip_cov", "kl_cov"):
        return minibatch
    mask_N = minibatch["action_mask"]
    covariance_N = policy_losses.covariances(minibatch[old_logprob(config)], minibatch["advantage"], mask_N)
    if own.loss_mode == "kl_cov":
        return minibatch.with_tokens(marked=policy_losses.kl_cov_tokens(covariance_N, mask_N, share=own.kl_cov_ratio))
    uniform_N = torch.from_numpy(np.random.default_rng([config.seed, step, index, 1]).random(minibatch.num_tokens))
    bounds = {"share": own.clip_cov_ratio, "low": own.clip_cov_lb, "high": own.clip_cov_ub}
    return minibatch.with_tokens(marked=policy_losses.clip_cov_tokens(covariance_N, mask_N, uniform_N, **bounds))


def value_loss(model: nn.Module, micro: Batch, totals: Totals, config: VerlPPOConfig) -> LossOutput:
    """Squared error to the returns, clipped around the values of the step's start."""
    own, mask_N = config.critic, micro["action_mask"]
    values = (token_values(model, micro), micro["value"], micro["return"], mask_N)
    tokens = clipped_value_loss(*values, clip=own.cliprange_value)
    return reduce_loss(tokens, mask_N, micro.lengths, totals, own.loss_agg_mode, config.data.max_response_length)


class KLController:
    """The weight of the KL in the reward: fixed, or more where the KL is beyond its target, and less where within."""

    def __init__(self, config: VerlPPOConfig) -> None:
        self._config = config
        self.coef = config.algorithm.kl_ctrl.kl_coef

    def adapt(self, experience: Batch) -> dict[str, float]:
        """Adapt the weight to the KL of a step; returns metrics."""
        own = self._config.algorithm.kl_ctrl
        if not self._config.algorithm.use_kl_in_reward:
            return {}
        kl_N = kl_of(experience, self._config)
        kl = float(sequence_means(kl_N, sampled(experience), experience.lengths).mean())
        metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": self.coef}
        if own.type == "adaptive":
            samples = len(experience)
            self.coef = adapted_kl_coef(self.coef, kl, target=own.target_kl, horizon=own.horizon, samples=samples)
        return metrics

    def state_dict(self) -> dict[str, float]:
        """Give what `load_state_dict` needs."""
        return {"coef": self.coef, "kl_coef": self._config.algorithm.kl_ctrl.kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with it; one that is fixed, or has another start than before, is what the options say."""
        own = self._config.algorithm.kl_ctrl
        if own.type == "adaptive" and state["kl_coef"] == own.kl_coef:
            self.coef = state["coef"]


def learnable(experience: Batch, config: VerlPPOConfig, part: str, step: int) -> list[Tensor]:
    """The `minibatches` of "actor" or "critic", without those of which all tokens were rejected."""
    acts_B = experience.sum_tokens(experience["action_mask"]) > 0
    return [chosen_B for chosen_B in minibatches(len(experience), config, part, step) if bool(acts_B[chosen_B].any())]


def minibatches(count: int, config: VerlPPOConfig, part: str, step: int) -> list[Tensor]:
    """Indices of each optimizer step of one rollout step, in order; shuffled by (seed, step, epoch) where asked for."""
    own = config.trained(part)
    # All of the same size, but at the end of filtered data, where a step of a few responses would move as far.
    parts = max(round(count / config.minibatch_sequences(part)), 1)
    if own.shuffle:
        seed = own.data_loader_seed or config.seed
        return shuffled_minibatches(count, parts, own.ppo_epochs, seed=seed, step=step)
    return [chosen_B for _ in range(own.ppo_epochs) for chosen_B in torch.arange(count).tensor_split(parts)]
