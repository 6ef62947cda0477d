"""The algorithm: shaping of rewards, advantage estimation, and the losses of policy and critic.

To change the algorithm, edit this file in a copy of the folder.

Legend: `B` sequences, `N` tokens of all sequences. Entry t of a per-token column refers to token t.
"""

from functools import partial

from torch import Tensor, nn

from components.batch import Batch
from components.data.samples import compare_samples, with_correction
from components.models.causal import token_logprobs
from components.models.state_values import token_values
from components.rl import advantages, exploration, group_advantages, returns
from components.rl.aggregation import LossOutput, Totals, reduce_loss
from components.rl.kl import kl_estimate
from components.rl.masked import sequence_means, token_mean
from components.rl.rewards import overlong_penalty
from components.rl.token_rewards import stop_properly_penalty, token_rewards
from components.rl.value_losses import clipped_value_loss
from training.roles import ppo_loss
from training.roles.ppo_loss import surrogate

from .config import PPOConfig

COMPARISONS = {
    "reinforce_baseline": advantages.group_mean_baseline,
    "rloo": advantages.rloo,
    "grpo": partial(advantages.group_norm, epsilon=1e-9),
    "dr_grpo": advantages.group_mean_baseline,
    "gpg": group_advantages.gpg,
    "grpo_passk": group_advantages.grpo_passk,
}
"""Estimator -> comparison of the rewards of a prompt's responses. `opo` also needs lengths. Other estimators do not
compare rewards."""

WHITENED = ("gae", "reinforce", "reinforce_baseline")
"""Estimators whose advantages are whitened over the whole step."""


def add_advantages(experience: Batch, config: PPOConfig, kl_coef: float) -> Batch:
    """Add `shaped_reward` [B], and `advantage`, `return` and, if configured, `correction` [N], to a step's batch."""
    options = config.algorithm
    mask_N = experience["action_mask"]
    kl_N = None
    if config.needs_reference and options.kl_in_reward:
        kl_N = kl_estimate(experience["logprob"], experience["reference_logprob"], mask_N, options.kl_estimator)
    shaped_B = shaped_rewards(experience, config)
    reward_N = token_rewards(shaped_B, kl_N, kl_coef, mask_N, experience.lengths)
    if config.needs_critic:
        value_N = experience["value"]
        advantage_N, return_N = returns.gae(reward_N, value_N, mask_N, experience.lengths, options.gamma, options.lam)
    else:
        advantage_N = return_N = returns.discounted_returns(reward_N, mask_N, experience.lengths, options.gamma)
    # Over the whole step, not a mini-batch: a mean over few responses would depend on which ones they are.
    if options.estimator in WHITENED:
        advantage_N = returns.whiten(advantage_N, mask_N, scale=options.std_norm)
    experience = experience.with_sequences(shaped_reward=shaped_B)
    experience = experience.with_tokens(advantage=advantage_N, **{"return": return_N})
    if not config.corrects_loss:
        return experience
    return with_correction(experience, options.correction, *options.correction_range)


def shaped_rewards(experience: Batch, config: PPOConfig) -> Tensor:
    """Return the rewards [B] after length penalties, comparison within groups, and clamping to `reward_range`."""
    options = config.algorithm
    longest = config.rollout.max_new_tokens
    reward_B = experience["reward"]
    length_B = experience.sum_tokens(experience["action_mask"])
    # Penalties come before the comparison, so that a response is compared with what the others really earn.
    if options.overlong_buffer is not None:
        reward_B = overlong_penalty(reward_B, length_B, longest, options.overlong_buffer, options.overlong_penalty)
    if options.truncated_factor is not None:
        reward_B = stop_properly_penalty(reward_B, experience["truncated"], options.truncated_factor)
    if options.estimator == "opo":
        reward_B = group_advantages.opo(reward_B, length_B, experience["prompt_id"])
    elif options.estimator in COMPARISONS:
        reward_B = compare_samples(experience, reward_B, COMPARISONS[options.estimator])
    return reward_B.clamp(*options.reward_range)


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: PPOConfig, kl_coef: float) -> LossOutput:
    """Return the surrogate loss with the entropy bonus and, if it is part of the loss, the KL to the reference."""
    options = config.algorithm
    mask_N = micro["action_mask"]
    longest = config.rollout.max_new_tokens
    output = token_logprobs(model, micro, config.rollout.temperature, with_entropy=True, mask="action_mask")
    assert output.entropy_N is not None
    # gspo corrects its ratio itself, so a weight would correct the same difference twice.
    weight_N = None
    if config.corrects_loss:
        weight_N = micro["correction"]
    tokens = surrogate(output.logprob_N, micro, config)
    policy = reduce_loss(tokens, mask_N, micro.lengths, totals, config.aggregation, longest, weight_N)
    entropy = reduce_loss(exploration.entropy_loss(output.entropy_N, mask_N), mask_N, micro.lengths, totals)
    loss = policy.loss
    metrics = policy.metrics | entropy.metrics | {"policy_loss": policy.loss.detach()}
    if options.entropy_coef:
        loss = loss + options.entropy_coef * entropy.loss
    if config.needs_reference and not options.kl_in_reward:
        kl_N = kl_estimate(output.logprob_N, micro["reference_logprob"], mask_N, options.kl_estimator)
        kl = token_mean(kl_N, mask_N, totals.tokens)
        loss = loss + kl_coef * kl
        metrics["kl_loss"] = kl.detach()
        # A sum, because `AdaptedKL.adapt` needs the mean over all tokens of the step, not over its optimizer steps.
        if options.kl_target is not None:
            metrics["kl_sum"] = kl.detach() * totals.tokens
    return LossOutput(loss=loss, metrics=metrics)


def value_loss(model: nn.Module, micro: Batch, totals: Totals, config: PPOConfig) -> LossOutput:
    """Return the squared error to the returns, clipped around the values at the start of the step."""
    value_N = token_values(model, micro)
    mask_N = micro["action_mask"]
    tokens = clipped_value_loss(value_N, micro["value"], micro["return"], mask_N, clip=config.critic.value_clip)
    return reduce_loss(tokens, mask_N, micro.lengths, totals)


class AdaptedKL(ppo_loss.AdaptedKL):
    """Adaptive coefficient of the KL."""

    def adapt(self, experience: Batch, metrics: dict[str, float]) -> None:
        """Adapt the coefficient to the KL of a step's responses, as OpenRLHF does.

        A KL in the reward is averaged over the tokens of each response, then over responses. A KL in the loss is
        averaged over the tokens of all optimizer steps, as computed before each update. Optimizer steps with fewer
        tokens count less.

        Args:
            experience: responses of the step.
            metrics: metrics of the update. The sum of the KL, `actor/kl_sum`, is removed from them.
        """
        options = self.config.algorithm
        mask_N = experience["action_mask"]
        kl_sum = metrics.pop("actor/kl_sum", 0.0)
        if options.kl_target is None:
            return
        if options.kl_in_reward:
            kl_N = kl_estimate(experience["logprob"], experience["reference_logprob"], mask_N, options.kl_estimator)
            kl = float(sequence_means(kl_N, mask_N, experience.lengths).mean())
        else:
            # A metric of the update is a mean over the optimizer steps. All epochs have the same number of them.
            kl = kl_sum * self.config.optimizer_steps(len(experience)) / int(mask_N.sum())
        self.follow(kl, len(experience))
