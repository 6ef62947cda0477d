"""PPO loss of one micro-batch, shared by algorithms that differ only in their advantages.

N: tokens of a micro-batch.
"""

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
    """Return the clipped surrogate loss over the tokens that the policy generated.

    With `algorithm.correction`, each token is weighted by the column `correction`.

    Args:
        model: the policy.
        micro: a micro-batch with `advantage`, `rollout_logprob`, and the columns that `old_logprobs` reads.
        totals: totals of the whole optimizer step, which normalise the loss.
        config: options of the run: clip range, correction, temperature.
        aggregation: weighting of the tokens.
        longest: maximum number of tokens of a response, for seq-mean-token-sum-norm.

    Source: Schulman et al. 2017 (arXiv 1707.06347).
    """
    algorithm = config.algorithm
    mask_N = micro["action_mask"]
    output = token_logprobs(model, micro, config.rollout.temperature, with_entropy=True, mask="action_mask")
    assert output.entropy_N is not None
    columns = (output.logprob_N, old_logprobs(micro, output.logprob_N), micro["advantage"], mask_N)
    tokens = ppo_loss(*columns, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
    weight_N = None
    if algorithm.correction != "none":
        weight_N = micro["correction"]
    policy = reduce_loss(tokens, mask_N, micro.lengths, totals, aggregation, longest, weight_N)
    # Measured in every loss: it is the first sign of an engine whose weights or kernels differ from the trainer's.
    gap_N = (output.logprob_N.detach() - micro["rollout_logprob"]).abs()
    metrics = {
        "policy_loss": policy.loss.detach(),
        "entropy": token_mean(output.entropy_N.detach(), mask_N, totals.tokens),
        "engine_gap": token_mean(gap_N, mask_N, totals.tokens),
    }
    return LossOutput(policy.loss, policy.metrics | metrics)
