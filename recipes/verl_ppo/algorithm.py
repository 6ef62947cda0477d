"""What makes the algorithm: what a reward becomes, who gets the credit for it, and the two losses, each by name.

Change a line here in a copy of the folder, and it is another algorithm. `B` sequences, `N` all tokens end to end;
entry t of a per-token column is about token t.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from components.batch import Batch
from components.data.minibatches import shuffled_minibatches
from components.data.samples import compare_samples, main_branches
from components.models.causal import token_logprobs, token_values
from components.rl import advantages, correction, group_advantages, policy_losses, returns
from components.rl.aggregation import LossOutput, TokenLoss, Totals, reduce_loss
from components.rl.kl import kl_estimate
from components.rl.masked import chosen, sequence_means, spread, token_mean
from components.rl.resampling import selection_weights
from components.rl.rewards import token_rewards
from components.rl.value_losses import clipped_value_loss
from training.roles import ppo_loss
from training.roles.ppo_loss import surrogate

from .config import VerlPPOConfig

EPSILON = 1e-6
"""What GRPO adds to the deviation of a group."""
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose advantages are whitened over the whole step."""


def with_greedy_rewards(rollouts: Batch, greedy: Batch) -> Batch:
    """Add `greedy_reward` [B], the reward of the greedy response to the same prompt: ReMax's baseline."""
    reward_of = dict(zip(greedy["prompt_id"].tolist(), greedy["reward"].tolist(), strict=True))
    greedy_B = torch.tensor([reward_of[prompt] for prompt in rollouts["prompt_id"].tolist()])
    # Without a baseline to compare it with, a response is as good as without a reward.
    has_none_B = torch.isin(rollouts["prompt_id"], greedy["prompt_id"][greedy["reward_failed"] > 0])
    failed_B = rollouts["reward_failed"].maximum(has_none_B.float())
    return rollouts.with_sequences(greedy_reward=greedy_B, reward_failed=failed_B)


def add_advantages(experience: Batch, config: VerlPPOConfig, kl_coef: float) -> Batch:
    """Add `shaped_reward` [B], `advantage`, `return` and, where it is asked for, `correction`, all [N], to a whole
    step's batch. Tokens that `rollout_rs` rejects are taken out of its `action_mask` once their responses have been
    rewarded, so that what they earned themselves is in no return; `sampled_mask` is what it was.
    """
    own, lengths_B = config.algorithm, experience.lengths
    kl_N = kl_of(experience, config) if own.kl_in_reward and config.needs_reference else None
    reward_N = token_rewards(experience["reward"], kl_N, kl_coef, experience["action_mask"], lengths_B)
    total_B = experience.sum_tokens(reward_N)
    trained = experience.with_sequences(shaped_reward=total_B)
    if not own.bypass:
        trained = correct(trained, config)
        if not bool(trained["action_mask"].any()):
            raise ValueError(
                f"algorithm.rejection={own.rejection} rejects every token of a step; raise algorithm."
                "rejection_threshold, or look for what the engine that samples computes otherwise (rollout_corr/kl)"
            )
    experience = experience if own.estimate_rejected else trained
    mask_N = experience["action_mask"]
    if own.estimator == "gae":
        advantage_N, return_N = returns.gae(reward_N, experience["value"], mask_N, lengths_B, own.gamma, own.lam)
    elif own.estimator == "reinforce_plus_plus":
        advantage_N = return_N = returns.discounted_returns(reward_N, mask_N, lengths_B, own.gamma)
    elif own.estimator == "remax":
        advantage_N, return_N = returns.remax(reward_N, experience["greedy_reward"], mask_N, lengths_B)
    elif own.estimator == "optimal_token_baseline":
        groups = (mask_N, lengths_B, experience["prompt_id"])
        advantage_N, return_N = returns.optimal_token_baseline(reward_N, energy(trained, config), *groups)
    else:
        worth_B = compared(experience, total_B, config)
        advantage_N = return_N = chosen(mask_N, spread(worth_B, lengths_B, len(mask_N)))
    if own.estimator in WHITENED:
        advantage_N = returns.whiten(advantage_N, trained["action_mask"], unbiased=True)
    return trained.with_tokens(advantage=chosen(trained["action_mask"], advantage_N), **{"return": return_N})


def energy(experience: Batch, config: VerlPPOConfig) -> Tensor:
    """[N] 1 - 2 p + sum_v p_v^2 of each token, of the policy before the step, times its squared weight."""
    logprob_N = experience["logprob"]
    # At half the temperature T log p is 2 x / T - log sum_v exp(2 x_v / T).
    squares_N = (2 * logprob_N - experience["sharp_logprob"]).exp()
    energy_N = 1 - 2 * logprob_N.exp() + squares_N
    return energy_N if config.algorithm.correction == "none" else energy_N * experience["correction"].square()


def compared(experience: Batch, reward_B: Tensor, config: VerlPPOConfig) -> Tensor:
    """[B] what rewards are worth beside those of the same prompt's other responses."""
    own = config.algorithm
    name = own.estimator
    if config.samples_per_prompt == 1:
        return reward_B
    mains = main_branches(experience)
    normalise: Callable[[Tensor, Tensor], Tensor] = partial(advantages.group_norm, epsilon=EPSILON)

    def opo(reward_B: Tensor, group_B: Tensor) -> Tensor:
        return group_advantages.opo(reward_B, mains.sum_tokens(mains["action_mask"]), group_B)

    def gdpo(_: Tensor, group_B: Tensor) -> Tensor:
        keys = own.gdpo_rewards
        logged = [name.removeprefix("log_") for name in mains.names if name.startswith("log_")]
        if missing := [key for key in keys if key not in logged]:
            raise ValueError(
                f"algorithm.gdpo_rewards has {', '.join(missing)}, but of numbers the reward function returns "
                f"{', '.join(logged) or 'none beside its score'}; name some of these, or return what is missing"
            )
        reward_BK = torch.stack([mains[f"log_{key}"] for key in keys], 1)
        return group_advantages.gdpo(reward_BK, group_B, torch.tensor(own.gdpo_weights or [1.0] * len(keys)), EPSILON)

    comparisons = {
        "opo": opo,
        "gdpo": gdpo,
        "grpo": normalise if own.std_norm else advantages.group_mean_baseline,
        "grpo_passk": partial(group_advantages.grpo_passk, divide_by_std=own.std_norm),
        "reinforce_plus_plus_baseline": advantages.group_mean_baseline,
        "rloo": advantages.rloo,
        "gpg": partial(group_advantages.gpg, scale=own.gpg_scale),
    }
    return compare_samples(experience, reward_B, comparisons[name])


def kl_of(experience: Batch, config: VerlPPOConfig) -> Tensor:
    """[N] estimates of the KL to the reference, as they come off the reward."""
    columns = (experience[config.old_policy], experience["reference_logprob"], sampled(experience))
    return kl_estimate(*columns, config.algorithm.kl_estimator)


def sampled(experience: Batch) -> Tensor:
    """[N] True where the policy produced the token, also where it is not learnt from."""
    return experience["sampled_mask" if "sampled_mask" in experience else "action_mask"]


def correct(experience: Batch, config: VerlPPOConfig) -> Batch:
    """Without the tokens that `rejection` leaves out, and with the weights `correction` [N] that are asked for."""
    own, mask_N = config.algorithm, experience["action_mask"]
    if own.correction == "none" and not own.rejection:
        return experience
    columns = (experience["logprob"], experience["rollout_logprob"], mask_N, experience.lengths)
    if own.correction != "none":
        outside = "zero" if own.correction == "icepop" else "clamp"
        low, high = own.correction_range
        weight_N = correction.importance_weights(
            *columns, level=own.correction_level, low=low, high=high, outside=outside
        )
        if own.correction_normalize:
            weight_N = weight_N / mean_weight(weight_N, experience, own.correction_level).clamp(min=1e-8)
        experience = experience.with_tokens(correction=weight_N)
    for level, estimator, least, most in own.rejections:
        kept_N = correction.rejection_weights(*columns, level=level, estimator=estimator, low=least, high=most)
        mask_N = mask_N & (kept_N > 0)
    if not own.rejection:
        return experience
    return experience.with_tokens(action_mask=mask_N, sampled_mask=experience["action_mask"])


def mean_weight(weight_N: Tensor, experience: Batch, level: str) -> Tensor:
    """The mean over tokens, or where every token of a sequence has its weight, over sequences."""
    mask_N = experience["action_mask"]
    if level == "token":
        return weight_N[mask_N].mean()
    acts_B = experience.sum_tokens(mask_N) > 0
    return sequence_means(weight_N, mask_N, experience.lengths)[acts_B].mean()


def of_all(totals: Totals) -> Totals:
    """Sequences of which all tokens were rejected count in means over sequences, as 0."""
    return replace(totals, sequences=totals.rows)


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: VerlPPOConfig) -> LossOutput:
    """The surrogate, less the entropy's reward, and with the KL to the reference where it is part of the loss."""
    own, mask_N = config.algorithm, micro["action_mask"]
    output = token_logprobs(model, micro, config.rollout.temperature, with_entropy=True)
    assert output.entropy_N is not None
    mean = partial(
        reduce_loss,
        mask_N=mask_N,
        lengths_B=micro.lengths,
        totals=of_all(totals),
        aggregation=own.loss_aggregation,
        max_length=own.loss_length or config.rollout.max_new_tokens,
    )
    if own.bypass:
        micro = correct(micro.with_tokens(logprob=output.logprob_N.detach()), config)
    # A ratio to the engine is its own correction.
    is_weighed = own.correction != "none" and (not own.bypass or own.policy_loss == "reinforce")
    weight_N = micro["correction"] if is_weighed else None
    policy = mean(
        surrogate(output.logprob_N, micro, config),
        mask_N=micro["action_mask"],
        weight_N=weight_N,
        aggregation=own.policy_aggregation or own.loss_aggregation,
    )
    entropy = mean(policy_losses.entropy_loss(output.entropy_N, mask_N))
    loss, metrics = policy.loss, policy.metrics | entropy.metrics | {"policy_loss": policy.loss.detach()}
    if own.entropy_coef:
        loss = loss + own.entropy_coef * entropy.loss
    kl_coef, estimator = config.kl_in_loss
    if kl_coef:
        kl_N = kl_estimate(output.logprob_N, micro["reference_logprob"], mask_N, estimator)
        kl = mean(TokenLoss(kl_N, {}))
        loss = loss + kl_coef * kl.loss
        metrics["kl_loss"] = kl.loss.detach()
    if own.bypass:  # else another pass has measured it
        gap_N = (output.logprob_N.detach() - micro["rollout_logprob"]).abs()
        metrics["engine_gap"] = token_mean(gap_N, mask_N, totals.tokens)
    return LossOutput(loss=loss, metrics=metrics)


def value_loss(model: nn.Module, micro: Batch, totals: Totals, config: VerlPPOConfig) -> LossOutput:
    """Squared error to the returns, clipped around the values of the step's start."""
    own, mask_N = config.critic, micro["action_mask"]
    values = (token_values(model, micro), micro["value"], micro["return"], mask_N)
    tokens = clipped_value_loss(*values, clip=own.value_clip)
    aggregation = own.loss_aggregation or config.algorithm.loss_aggregation
    longest = config.algorithm.loss_length or config.rollout.max_new_tokens
    return reduce_loss(tokens, mask_N, micro.lengths, of_all(totals), aggregation, longest)


class AdaptedKL(ppo_loss.AdaptedKL):
    """The weight of the KL in the reward."""

    config: VerlPPOConfig

    def adapt(self, experience: Batch) -> dict[str, float]:
        """Adapt the weight to the KL of a step; returns metrics."""
        if not self.config.algorithm.kl_in_reward or not self.config.needs_reference:
            return {}
        kl_N = kl_of(experience, self.config)
        kl = float(sequence_means(kl_N, sampled(experience), experience.lengths).mean())
        metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": self.coef}
        self.follow(kl, len(experience))
        return metrics


def minibatches(experience: Batch, config: VerlPPOConfig, part: str, step: int) -> list[Tensor]:
    """Indices of each optimizer step of "actor" or "critic", in order, or shuffled by (seed, step, epoch), of all
    responses or as many drawn by their rewards; without those of which all tokens were rejected.
    """
    own, count, rule = config.trained(part), len(experience), config.algorithm.resample
    # All of the same size, but at the end of filtered data, where a step of a few responses would move as far.
    parts = max(round(count / config.size_of(part)), 1)
    found = [chosen_B for _ in range(own.epochs) for chosen_B in torch.arange(count).tensor_split(parts)]
    if own.shuffle:
        found = shuffled_minibatches(count, parts, own.epochs, seed=config.seed, step=step)
    if rule is not None:
        weight_B = selection_weights(experience["reward"], rule, config.algorithm.resample_power)
        draw = np.random.default_rng([config.seed, step, 2])  # the same for actor and critic
        drawn_B = torch.from_numpy(draw.choice(count, size=count, p=(weight_B / weight_B.sum()).numpy()))
        found = [drawn_B[chosen_B] for chosen_B in found]
    acts_B = experience.sum_tokens(experience["action_mask"]) > 0
    return [chosen_B for chosen_B in found if bool(acts_B[chosen_B].any())]
