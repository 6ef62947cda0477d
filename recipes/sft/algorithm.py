"""The algorithm of supervised fine-tuning: the loss. `N` all tokens of a micro-batch end to end."""

from torch import nn

from components.batch import Batch
from components.models.causal import token_logprobs
from components.rl.aggregation import LossOutput, Totals
from components.rl.supervised import sft_loss


def loss(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
    """Return the mean negative log-probability of the response tokens, in nats.

    Prompt tokens have no weight. The mean is over the whole optimizer step on all ranks (`totals`).
    """
    logprob_N = token_logprobs(model, micro, mask="loss_mask").logprob_N
    return sft_loss(logprob_N, micro["loss_mask"], totals.tokens)
