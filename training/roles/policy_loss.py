"""PPO's loss of one micro-batch, for algorithms that differ in their advantages alone. `N` tokens of a micro-batch."""

from torch import nn

from components.batch import Batch
from components.data.samples import old_logprobs
from components.models.causal import token_logprobs
from components.rl.aggregation import Aggregation, LossOutput, Totals, reduce_loss
from components.rl.masked import token_mean
from components.rl.policy_losses import ppo_loss
from training.options.rl_options import RLOptions


def clipped_policy_loss(
    model: nn.Module,
    micro: Batch,
    totals: Totals,
    config: RLOptions,
    aggregation: Aggregation = "token-mean",
    longest: int | None = None,
) -> LossOutput:
    """The clipped surrogate over the tokens that the policy wrote, weighed by `correction` where there is one.

    Args:
        model: the policy.
        micro: with `advantage`, `rollout_logprob`, and what `old_logprobs` reads.
        totals: of the whole optimizer step, by which the loss is normalised.
        config: of the run: clip range, correction, temperature.
        aggregation: how tokens are weighed.
        longest: tokens of a response at most, for seq-mean-token-sum-norm.

    Source: Schulman et al. 2017 (arXiv 1707.06347).
    """
    own = config.algorithm
    mask_N = micro["action_mask"]
    output = token_logprobs(model, micro, config.rollout.temperature, with_entropy=True)
    assert output.entropy_N is not None
    columns = (output.logprob_N, old_logprobs(micro, output.logprob_N), micro["advantage"], mask_N)
    tokens = ppo_loss(*columns, clip_low=own.clip_low, clip_high=own.clip_high)
    weight_N = micro["correction"] if own.correction != "none" else None
    policy = reduce_loss(tokens, mask_N, micro.lengths, totals, aggregation, longest, weight_N)
    gap_N = (output.logprob_N.detach() - micro["rollout_logprob"]).abs()
    metrics = {
        "policy_loss": policy.loss.detach(),
        "entropy": token_mean(output.entropy_N.detach(), mask_N, totals.tokens),
        "engine_gap": token_mean(gap_N, mask_N, totals.tokens),
    }
    return LossOutput(policy.loss, policy.metrics | metrics)
