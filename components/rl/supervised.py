"""Loss of supervised fine-tuning. Shape suffix: N all tokens of a micro-batch end to end."""

from torch import Tensor

from components.rl.aggregation import LossOutput
from components.rl.masked import token_mean


def sft_loss(logprob_N: Tensor, loss_mask_N: Tensor, total_tokens: float) -> LossOutput:
    """Mean negative log-likelihood of the masked tokens (cross-entropy; Ouyang et al. 2022, arXiv 2203.02155, 3.1).

    Args:
        logprob_N: [N] log-probability of each token given the tokens before it, nats.
        loss_mask_N: [N] bool, True for the tokens to learn.
        total_tokens: number of tokens to learn in the complete optimizer step, on all ranks.

    Returns:
        The loss, and the metric `nll` (the loss again), in nats per token.
    """
    loss = -token_mean(logprob_N, loss_mask_N, total_tokens)
    return LossOutput(loss=loss, metrics={"nll": loss.detach()})
