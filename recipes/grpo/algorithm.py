"""The algorithm of GRPO: group-relative advantages and the policy loss.

To change the algorithm, copy the folder and edit this file. Shape suffixes: `B` responses, `N` all tokens of these
responses end to end, without padding. Entry t of a per-token column belongs to token t.
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
    """Add `shaped_reward` [B] and `advantage` [N], and `correction` [N] if `algorithm.correction` is set.

    Args:
        samples: all responses of a step. A group is the set of responses with the same `prompt_id`.
        config: the configuration of the run.
    """
    reward_B = shaped_rewards(samples, config)
    mask_N = samples["action_mask"]
    compare = advantages.group_mean_baseline
    if config.algorithm.std_norm:
        compare = partial(advantages.group_norm, epsilon=config.algorithm.std_epsilon)
    advantage_B = compare_samples(samples, reward_B, compare)
    samples = samples.with_sequences(shaped_reward=reward_B)
    # All tokens of a response share its advantage. Prompt tokens get 0, so that statistics over N ignore them.
    samples = samples.with_tokens(advantage=advantage_B[samples.sequence_ids] * mask_N)
    return with_correction(samples, config.algorithm.correction, *config.algorithm.correction_range)


def shaped_rewards(samples: Batch, config: GRPOConfig) -> Tensor:
    """Return the rewards [B], reduced by the overlong penalty for responses close to the maximum length."""
    algorithm = config.algorithm
    if algorithm.overlong_buffer is None:
        return samples["reward"]
    length_B = samples.sum_tokens(samples["action_mask"])
    max_length = config.rollout.max_new_tokens
    return overlong_penalty(
        samples["reward"], length_B, max_length, algorithm.overlong_buffer, algorithm.overlong_penalty
    )


def policy_loss(model: nn.Module, micro: Batch, totals: Totals, config: GRPOConfig) -> LossOutput:
    """Return the clipped surrogate loss of a micro-batch, plus the KL penalty if `algorithm.kl_coef` is above 0.

    Args:
        model: the policy.
        micro: the micro-batch.
        totals: token and sequence counts of the whole optimizer step on all ranks. The loss is divided by these and not
            by the counts of the micro-batch, so that micro-batches and ranks do not change the result.
        config: the configuration of the run.
    """
    algorithm = config.algorithm
    mask_N = micro["action_mask"]
    max_length = config.rollout.max_new_tokens
    output = token_logprobs(model, micro, config.rollout.temperature, with_entropy=True, mask="action_mask")
    assert output.entropy_N is not None
    weight_N = None
    if algorithm.correction != "none":
        weight_N = micro["correction"]
    tokens = surrogate(output.logprob_N, micro, config)
    policy = reduce_loss(tokens, mask_N, micro.lengths, totals, algorithm.loss_aggregation, max_length, weight_N)
    gap_N = (output.logprob_N.detach() - micro["rollout_logprob"]).abs()
    metrics = {
        "policy_loss": policy.loss.detach(),
        "entropy": token_mean(output.entropy_N.detach(), mask_N, totals.tokens),
        "engine_gap": token_mean(gap_N, mask_N, totals.tokens),
    }
    if not config.needs_reference:
        return LossOutput(policy.loss, policy.metrics | metrics)
    kl_N = kl_estimate(output.logprob_N, micro["reference_logprob"], mask_N, algorithm.kl_estimator)
    kl = aggregate(kl_N, mask_N, micro.lengths, totals, algorithm.loss_aggregation, max_length)
    return LossOutput(policy.loss + algorithm.kl_coef * kl, policy.metrics | metrics | {"kl_loss": kl.detach()})


def surrogate(logprob_N: Tensor, micro: Batch, config: GRPOConfig) -> TokenLoss:
    """Return the clipped surrogate loss of each token [N].

    The importance-sampling ratio is that of the token (PPO), or the geometric mean over its response (GSPO).
    """
    algorithm = config.algorithm
    old_logprob_N = old_logprobs(micro, logprob_N)
    columns = (logprob_N, old_logprob_N, micro["advantage"], micro["action_mask"])
    if algorithm.ratio == "sequence":
        return policy_losses.gspo_loss(
            *columns, micro.lengths, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high
        )
    return policy_losses.ppo_loss(*columns, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
