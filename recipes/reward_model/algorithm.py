"""What makes this a reward model: where a score is read, and the loss of a pair.

P pairs; B = 2P sequences, chosen and rejected in turn; N all tokens end to end.
"""

from torch import Tensor, nn

from components.batch import Batch
from components.models.causal import state_values
from components.rl.aggregation import LossOutput, Totals
from components.rl.preference_losses import bradley_terry_loss

PAIR = 2
"""Sequences that belong together."""


def at_the_end(score_N: Tensor, batch: Batch) -> Tensor:
    """[B] the score after the last token of each sequence, which is its end token."""
    return score_N[batch.offsets[1:] - 1]


def loss(model: nn.Module, micro: Batch, totals: Totals, with_margin: bool = False) -> LossOutput:
    """Bradley-Terry: -log of the probability that the chosen responses win, on average over the optimizer step."""
    score_P2 = at_the_end(state_values(model, micro), micro).view(-1, PAIR)
    margin_P = micro["margin"][::PAIR] if with_margin else None
    return bradley_terry_loss(score_P2[:, 0], score_P2[:, 1], totals.sequences / PAIR, margin_P)
