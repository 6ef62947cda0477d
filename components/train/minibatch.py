"""The global minibatch of an optimizer step: what its losses are divided by."""

from __future__ import annotations

from torch import Tensor

from components.batch import Batch
from components.models.packing.layout import members_of
from components.rl.aggregation import Totals
from components.rl.masked import sequence_sums


def totals_of(minibatch: Batch) -> Totals:
    """Return the numbers of tokens and sequences that are trained on: by `action_mask` where the batch has it, else
    `loss_mask`, else all tokens.

    Raises:
        ValueError: nothing is trained on.
    """
    if not len(minibatch):
        raise ValueError("the minibatch is empty; give train_step at least one sequence")
    mask = next((name for name in ("action_mask", "loss_mask") if name in minibatch), None)
    # In float64, which counts exactly.
    tokens_B = sequence_sums(minibatch[mask].double(), minibatch.lengths) if mask else minibatch.lengths
    tokens = int(tokens_B.sum())
    if tokens == 0:
        raise ValueError(
            f"{mask} is False for all {minibatch.num_tokens} tokens of the minibatch, so nothing can be "
            "learned; leave such minibatches out"
        )
    return Totals(tokens=tokens, sequences=int((tokens_B > 0).sum()), rows=len(minibatch))


def shortest_group(batch: Batch, group_size: int = 1) -> Tensor:
    """Return the positions of the cheapest group, for a pass that is only made because other ranks make one."""
    return members_of(batch.lengths.view(-1, group_size).sum(1).argmin(), group_size)
