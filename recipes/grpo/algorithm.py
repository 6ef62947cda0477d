"""What makes this GRPO: the advantage of a response over the others to its prompt, and the loss.

Change a line here in a copy of the folder, and it is another algorithm. `B` responses, `N` all their tokens end to end;
entry t of a per-token column is about token t.
"""

from functools import partial

from torch import Tensor, nn

from components.batch import Batch
from components.data.samples import compare_samples, old_logprobs, with_correction
from components.models.causal import token_logprobs
from components.rl import advantages, policy_losses
from components.rl.aggregation import LossOutput, TokenLoss, Totals, aggregate, reduce_loss
from components.rl.kl import kl_estimate
from components.rl.masked import token_mean
from components.rl.rewards import overlong_penalty

from .config import GRPOConfig


def add_advantages(samples: Batch, config: GRPOConfig) -> Batch:
    """Add `shaped_reward` [B], `advantage` [N] and, where it is asked for, `correction` [N] to a step's responses."""
    reward_B = shaped_rewards(samples, config)
    mask_N = samples["action_mask"]
    normalise = partial(advantages.group_norm, epsilon=config.algorithm.std_epsilon)
    compare = normalise if config.algorithm.std_norm else advantages.group_mean_baseline
    advantage_B = compare_samples(samples, reward_B, compare)  # with those of the same `prompt_id`
    samples = samples.with_sequences(shaped_reward=reward_B)
    samples = samples.with_tokens(advantage=advantage_B[samples.sequence_ids] * mask_N)
    return with_correction(samples, config.algorithm.correction, *config.algorithm.correction_range)


def shaped_rewards(samples: Batch, config: GRPOConfig) -> Tensor:
    """[B] rewards, less the penalty on responses that come close to the longest that is allowed."""
    own = config.algorithm
    if own.overlong_buffer is None:
        return samples["reward"]
    length_B = samples.sum_tokens(samples["action_mask"])
    longest = config.rollout.max_new_tokens
    return overlong_penalty(samples["reward"], length_B, longest, own.overlong_buffer, own.overlong_penalty)


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: GRPOConfig) -> LossOutput:
    """The clipped surrogate, and the KL to the reference model where it has a weight."""
    own = config.algorithm
    mask_N = micro["action_mask"]
    longest = config.rollout.max_new_tokens
    output = token_logprobs(model, micro, config.rollout.temperature, with_entropy=True)
    assert output.entropy_N is not None
    weight_N = micro["correction"] if own.correction != "none" else None
    tokens = surrogate(output.logprob_N, micro, config)
    policy = reduce_loss(tokens, mask_N, micro.lengths, totals, own.loss_aggregation, longest, weight_N)
    gap_N = (output.logprob_N.detach() - micro["rollout_logprob"]).abs()
    metrics = {
        "policy_loss": policy.loss.detach(),
        "entropy": token_mean(output.entropy_N.detach(), mask_N, totals.tokens),
        "engine_gap": token_mean(gap_N, mask_N, totals.tokens),
    }
    if not config.needs_reference:
        return LossOutput(policy.loss, policy.metrics | metrics)
    kl_N = kl_estimate(output.logprob_N, micro["reference_logprob"], mask_N, own.kl_estimator)
    kl = aggregate(kl_N, mask_N, micro.lengths, totals, own.loss_aggregation, longest)
    return LossOutput(policy.loss + own.kl_coef * kl, policy.metrics | metrics | {"kl_loss": kl.detach()})


def surrogate(logprob_N: Tensor, micro: Batch, config: GRPOConfig) -> TokenLoss:
    """The loss of each token: PPO's clipped surrogate on its own ratio, or on that of its response."""
    own = config.algorithm
    old_logprob_N = old_logprobs(micro, logprob_N)  # of the policy before the update
    columns = (logprob_N, old_logprob_N, micro["advantage"], micro["action_mask"])
    if own.ratio == "sequence":
        return policy_losses.gspo_loss(*columns, micro.lengths, clip_low=own.clip_low, clip_high=own.clip_high)
    return policy_losses.ppo_loss(*columns, clip_low=own.clip_low, clip_high=own.clip_high)
