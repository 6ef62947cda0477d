"""The algorithm: shaping of rewards, advantage estimation, and the losses of policy and critic.

To change the algorithm, edit this file in a copy of the folder.

Legend: `B` sequences, `N` tokens of all sequences. Entry t of a per-token column refers to token t.
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
from components.models.causal import token_logprobs
from components.models.state_values import token_values
from components.rl import advantages, correction, exploration, group_advantages, returns
from components.rl.aggregation import LossOutput, TokenLoss, Totals, reduce_loss
from components.rl.kl import kl_estimate
from components.rl.masked import chosen, sequence_means, spread, token_mean
from components.rl.resampling import selection_weights
from components.rl.token_rewards import token_rewards
from components.rl.value_losses import clipped_value_loss
from training.roles import ppo_loss
from training.roles.ppo_loss import surrogate

from .config import VerlPPOConfig

EPSILON = 1e-6
"""Term that GRPO adds to the standard deviation of a group."""
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose advantages are whitened over the whole step."""


def with_greedy_rewards(rollouts: Batch, greedy: Batch) -> Batch:
    """Add `greedy_reward` [B], the reward of the greedy response to the same prompt: ReMax's baseline."""
    reward_of = dict(zip(greedy["prompt_id"].tolist(), greedy["reward"].tolist(), strict=True))
    greedy_B = torch.tensor([reward_of[prompt] for prompt in rollouts["prompt_id"].tolist()])
    # A response whose baseline failed cannot be compared, so it is treated as one without a reward.
    has_none_B = torch.isin(rollouts["prompt_id"], greedy["prompt_id"][greedy["reward_failed"] > 0])
    failed_B = rollouts["reward_failed"].maximum(has_none_B.float())
    return rollouts.with_sequences(greedy_reward=greedy_B, reward_failed=failed_B)


def add_advantages(experience: Batch, config: VerlPPOConfig, kl_coef: float) -> Batch:
    """Add `shaped_reward` [B], `advantage` [N], `return` [N] and, if configured, `correction` [N] to a step's batch.

    Tokens that `rollout_rs` rejects are removed from `action_mask` after the rewards are assigned, so that their
    rewards are in no return. `sampled_mask` keeps the original mask.

    Raises:
        ValueError: all tokens of the step are rejected.
    """
    algorithm, lengths_B = config.algorithm, experience.lengths
    kl_N = kl_of(experience, config) if algorithm.kl_in_reward and config.needs_reference else None
    reward_N = token_rewards(experience["reward"], kl_N, kl_coef, experience["action_mask"], lengths_B)
    total_B = experience.sum_tokens(reward_N)
    trained = experience.with_sequences(shaped_reward=total_B)
    if not algorithm.bypass:
        trained = correct(trained, config)
        if not bool(trained["action_mask"].any()):
            raise ValueError(
                f"algorithm.rejection={algorithm.rejection} rejects every token of a step; raise algorithm."
                "rejection_threshold, or find the difference between engine and trainer (rollout_corr/kl)"
            )
    if not algorithm.estimate_rejected:
        experience = trained
    mask_N = experience["action_mask"]
    gamma = algorithm.gamma
    if algorithm.estimator == "gae":
        advantage_N, return_N = returns.gae(reward_N, experience["value"], mask_N, lengths_B, gamma, algorithm.lam)
    elif algorithm.estimator == "reinforce_plus_plus":
        advantage_N = return_N = returns.discounted_returns(reward_N, mask_N, lengths_B, gamma)
    elif algorithm.estimator == "remax":
        advantage_N, return_N = returns.remax(reward_N, experience["greedy_reward"], mask_N, lengths_B)
    elif algorithm.estimator == "distillation":
        columns = (experience[config.old_policy], experience["reference_logprob"], mask_N)
        advantage_N = return_N = -kl_estimate(*columns, "k1")
    elif algorithm.estimator == "optimal_token_baseline":
        groups = (mask_N, lengths_B, experience["prompt_id"])
        advantage_N, return_N = returns.optimal_token_baseline(reward_N, energy(trained, config), *groups)
    else:
        worth_B = compared(experience, total_B, config)
        advantage_N = return_N = chosen(mask_N, spread(worth_B, lengths_B, len(mask_N)))
    if algorithm.estimator in WHITENED:
        # Rejected tokens are not trained on, so they must not move the mean and the variance.
        advantage_N = returns.whiten(advantage_N, trained["action_mask"], unbiased=True)
    return trained.with_tokens(advantage=chosen(trained["action_mask"], advantage_N), **{"return": return_N})


def energy(experience: Batch, config: VerlPPOConfig) -> Tensor:
    """Return 1 - 2 p + sum_v p_v^2 of each token [N] under the policy before the step, times its squared weight."""
    logprob_N = experience["logprob"]
    # At half the temperature T log p is 2 x / T - log sum_v exp(2 x_v / T).
    squares_N = (2 * logprob_N - experience["sharp_logprob"]).exp()
    energy_N = 1 - 2 * logprob_N.exp() + squares_N
    return energy_N if config.algorithm.correction == "none" else energy_N * experience["correction"].square()


def compared(experience: Batch, reward_B: Tensor, config: VerlPPOConfig) -> Tensor:
    """Return rewards [B] relative to those of the other responses to the same prompt."""
    algorithm = config.algorithm
    name = algorithm.estimator
    if config.samples_per_prompt == 1:
        return reward_B
    mains = main_branches(experience)
    normalise: Callable[[Tensor, Tensor], Tensor] = partial(advantages.group_norm, epsilon=EPSILON)

    def opo(reward_B: Tensor, group_B: Tensor) -> Tensor:
        return group_advantages.opo(reward_B, mains.sum_tokens(mains["action_mask"]), group_B)

    def gdpo(_: Tensor, group_B: Tensor) -> Tensor:
        keys = algorithm.gdpo_rewards
        logged = [name.removeprefix("log_") for name in mains.names if name.startswith("log_")]
        if missing := [key for key in keys if key not in logged]:
            raise ValueError(
                f"algorithm.gdpo_rewards has {', '.join(missing)}, but of numbers the reward function returns "
                f"{', '.join(logged) or 'none beside its score'}; name some of these, or return what is missing"
            )
        reward_BK = torch.stack([mains[f"log_{key}"] for key in keys], 1)
        weight_K = torch.tensor(algorithm.gdpo_weights or [1.0] * len(keys))
        return group_advantages.gdpo(reward_BK, group_B, weight_K, EPSILON)

    comparisons = {
        "opo": opo,
        "gdpo": gdpo,
        "grpo": normalise if algorithm.std_norm else advantages.group_mean_baseline,
        "grpo_passk": partial(group_advantages.grpo_passk, divide_by_std=algorithm.std_norm),
        "reinforce_plus_plus_baseline": advantages.group_mean_baseline,
        "rloo": advantages.rloo,
        "gpg": partial(group_advantages.gpg, scale=algorithm.gpg_scale),
    }
    return compare_samples(experience, reward_B, comparisons[name])


def kl_of(experience: Batch, config: VerlPPOConfig) -> Tensor:
    """Return the estimates [N] of the KL to the reference that are subtracted from the reward."""
    columns = (experience[config.old_policy], experience["reference_logprob"], sampled(experience))
    return kl_estimate(*columns, config.algorithm.kl_estimator)


def sampled(experience: Batch) -> Tensor:
    """Return the mask [N] of tokens that the policy sampled, including rejected ones."""
    return experience["sampled_mask" if "sampled_mask" in experience else "action_mask"]


def correct(experience: Batch, config: VerlPPOConfig) -> Batch:
    """Add the importance weights `correction` [N], and remove rejected tokens from `action_mask`, as configured."""
    algorithm, mask_N = config.algorithm, experience["action_mask"]
    if algorithm.correction == "none" and not algorithm.rejection:
        return experience
    columns = (experience["logprob"], experience["rollout_logprob"], mask_N, experience.lengths)
    if algorithm.correction != "none":
        outside = "zero" if algorithm.correction == "icepop" else "clamp"
        low, high = algorithm.correction_range
        weight_N = correction.importance_weights(
            *columns, level=algorithm.correction_level, low=low, high=high, outside=outside
        )
        if algorithm.correction_normalize:
            weight_N = weight_N / mean_weight(weight_N, experience, algorithm.correction_level).clamp(min=1e-8)
        experience = experience.with_tokens(correction=weight_N)
    for level, estimator, least, most in algorithm.rejections:
        kept_N = correction.rejection_weights(*columns, level=level, estimator=estimator, low=least, high=most)
        mask_N = mask_N & (kept_N > 0)
    if not algorithm.rejection:
        return experience
    return experience.with_tokens(action_mask=mask_N, sampled_mask=experience["action_mask"])


def mean_weight(weight_N: Tensor, experience: Batch, level: str) -> Tensor:
    """Return the mean weight over tokens, or over sequences if weights are per sequence."""
    mask_N = experience["action_mask"]
    if level == "token":
        return weight_N[mask_N].mean()
    acts_B = experience.sum_tokens(mask_N) > 0
    return sequence_means(weight_N, mask_N, experience.lengths)[acts_B].mean()


def count_all_sequences(totals: Totals) -> Totals:
    """Return totals in which sequences without any accepted token count as 0 in means over sequences."""
    return replace(totals, sequences=totals.rows)


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: VerlPPOConfig) -> LossOutput:
    """Compute the surrogate loss with the entropy bonus and, if configured, the KL to the reference."""
    algorithm, mask_N = config.algorithm, micro["action_mask"]
    output = token_logprobs(model, micro, config.rollout.temperature, with_entropy=True)
    assert output.entropy_N is not None
    mean = partial(
        reduce_loss,
        mask_N=mask_N,
        lengths_B=micro.lengths,
        totals=count_all_sequences(totals),
        aggregation=algorithm.loss_aggregation,
        max_length=algorithm.loss_length or config.rollout.max_new_tokens,
    )
    if algorithm.bypass:
        # There are no old log-probabilities, so engine and current policy are compared in every pass.
        micro = correct(micro.with_tokens(logprob=output.logprob_N.detach()), config)
    # A ratio to the engine is its own correction.
    is_weighed = algorithm.correction != "none" and (not algorithm.bypass or algorithm.policy_loss == "reinforce")
    weight_N = micro["correction"] if is_weighed else None
    policy = mean(
        surrogate(output.logprob_N, micro, config),
        mask_N=micro["action_mask"],
        weight_N=weight_N,
        aggregation=algorithm.policy_aggregation or algorithm.loss_aggregation,
    )
    entropy = mean(exploration.entropy_loss(output.entropy_N, mask_N))
    loss, metrics = policy.loss, policy.metrics | entropy.metrics | {"policy_loss": policy.loss.detach()}
    if algorithm.entropy_coef:
        loss = loss + algorithm.entropy_coef * entropy.loss
    kl_coef, estimator = config.kl_in_loss
    if kl_coef:
        kl_N = kl_estimate(output.logprob_N, micro["reference_logprob"], mask_N, estimator)
        kl = mean(TokenLoss(kl_N, {}))
        loss = loss + kl_coef * kl.loss
        metrics["kl_loss"] = kl.loss.detach()
    if algorithm.bypass:  # otherwise it is measured from the old log-probabilities
        gap_N = (output.logprob_N.detach() - micro["rollout_logprob"]).abs()
        metrics["engine_gap"] = token_mean(gap_N, mask_N, totals.tokens)
    return LossOutput(loss=loss, metrics=metrics)


def value_loss(model: nn.Module, micro: Batch, totals: Totals, config: VerlPPOConfig) -> LossOutput:
    """Compute the squared error to the returns, clipped around the values at the start of the step."""
    critic, mask_N = config.critic, micro["action_mask"]
    values = (token_values(model, micro), micro["value"], micro["return"], mask_N)
    tokens = clipped_value_loss(*values, clip=critic.value_clip)
    aggregation = critic.loss_aggregation or config.algorithm.loss_aggregation
    longest = config.algorithm.loss_length or config.rollout.max_new_tokens
    return reduce_loss(tokens, mask_N, micro.lengths, count_all_sequences(totals), aggregation, longest)


class AdaptedKL(ppo_loss.AdaptedKL):
    """Adaptive coefficient of the KL in the reward."""

    config: VerlPPOConfig

    def adapt(self, experience: Batch) -> dict[str, float]:
        """Adapt the coefficient to the KL of a step. Return metrics."""
        if not self.config.algorithm.kl_in_reward or not self.config.needs_reference:
            return {}
        kl_N = kl_of(experience, self.config)
        kl = float(sequence_means(kl_N, sampled(experience), experience.lengths).mean())
        metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": self.coef}
        self.follow(kl, len(experience))
        return metrics


def minibatches(experience: Batch, config: VerlPPOConfig, part: str, step: int) -> list[Tensor]:
    """Return the response indices of each optimizer step of "actor" or "critic".

    Responses are in order, shuffled by (seed, step, epoch), or resampled by their rewards. Optimizer steps whose
    tokens are all rejected are left out.
    """
    learner, count, rule = config.trained(part), len(experience), config.algorithm.resample
    # The number is rounded: an additional step with a few responses would change the model as much as a complete one.
    parts = max(round(count / config.size_of(part)), 1)
    steps = [chosen_B for _ in range(learner.epochs) for chosen_B in torch.arange(count).tensor_split(parts)]
    if learner.shuffle:
        steps = shuffled_minibatches(count, parts, learner.epochs, seed=config.seed, step=step)
    if rule is not None:
        weight_B = selection_weights(experience["reward"], rule, config.algorithm.resample_power)
        draw = np.random.default_rng([config.seed, step, 2])  # the same for actor and critic
        drawn_B = torch.from_numpy(draw.choice(count, size=count, p=(weight_B / weight_B.sum()).numpy()))
        steps = [drawn_B[chosen_B] for chosen_B in steps]
    acts_B = experience.sum_tokens(experience["action_mask"]) > 0
    return [chosen_B for chosen_B in steps if bool(acts_B[chosen_B].any())]
