"""What makes this supervised fine-tuning: the loss, and the order of the demonstrations."""

import numpy as np
import torch
from torch import Tensor, nn

from components.batch import Batch
from components.engines.causal import token_logprobs
from components.rl.aggregation import LossOutput, Totals
from components.rl.supervised import sft_loss


def loss(model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
    """Mean negative log-probability of the response tokens; prompts count nothing."""
    return sft_loss(token_logprobs(model, micro).logprob_N, micro["loss_mask"], totals.tokens)


def minibatches(count: int, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
    """Indices of each optimizer step of one epoch. The last one may be smaller; nothing is dropped."""
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return list(torch.from_numpy(order).split(batch_size))
