"""What makes this supervised fine-tuning: the loss."""

from torch import nn

from components.batch import Batch
from components.models.causal import token_logprobs
from components.rl.aggregation import LossOutput, Totals
from components.rl.supervised import sft_loss


def loss(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
    """Mean negative log-probability of the response tokens; prompts count nothing."""
    return sft_loss(token_logprobs(model, micro).logprob_N, micro["loss_mask"], totals.tokens)
