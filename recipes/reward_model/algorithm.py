"""The algorithm of the reward model: scores of sequences and the loss of a pair.

Shape suffixes: `P` pairs, `B` = 2P sequences (chosen, rejected, chosen, ...), `N` all tokens end to end.
"""

from torch import Tensor, nn

from components.batch import Batch
from components.models.state_values import state_values
from components.rl.aggregation import LossOutput, Totals
from components.rl.preference_losses import bradley_terry_loss

PAIR = 2
"""Number of sequences in a pair: the chosen response, then the rejected one."""


def at_the_end(score_N: Tensor, batch: Batch) -> Tensor:
    """Return [B] the value at the last token of each sequence, which is its end token."""
    return score_N[batch.offsets[1:] - 1]


def loss(model: nn.Module, micro: Batch, totals: Totals, with_margin: bool = False) -> LossOutput:
    """Return the Bradley-Terry loss: -log sigmoid(chosen - rejected - margin), averaged over the optimizer step.

    Args:
        model: the reward model.
        micro: the micro-batch of pairs.
        totals: counts of the whole optimizer step on all ranks.
        with_margin: use the column `margin` of the pairs; otherwise the margin is 0.
    """
    score_P2 = at_the_end(state_values(model, micro), micro).view(-1, PAIR)
    margin_P = micro["margin"][::PAIR] if with_margin else None  # both sequences of a pair carry it
    return bradley_terry_loss(score_P2[:, 0], score_P2[:, 1], totals.sequences / PAIR, margin_P)
