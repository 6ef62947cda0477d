"""The layout of sequences in the rows of a model: each in a padded row of its own, or end to end in one row.

The layout of a model also cuts batches into micro-batches, as it decides what a sequence costs. A plug-in that computes
tokens which several sequences share once provides an `EndToEnd` with plans of its own (kind `row layout`).

Legend: `B` sequences, `G` groups of `S` sequences, `N` all their tokens end to end, `U` places of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from components.batch import Batch

_MARK = "row_layout"


class Part(NamedTuple):
    """Contiguous tokens of a sequence that are queries of attention."""

    sequence: int
    first: int
    """Position of the first token."""
    end: int
    """Position after the last token."""


class RowPlan(NamedTuple):
    """Plan of a packed row in which several tokens may share a place."""

    place_N: Tensor
    """[N] int64, place in the row of each token."""
    first_U: Tensor
    """[U] int64, first token of each place."""
    parts: list[Part]
    """Queries of attention. Every place of the row is in at least one of them."""


class ComputedTokens(NamedTuple):
    """Number of tokens and attention pairs that the layers of a model compute."""

    places: int
    """Number of positions that every layer computes. Padding counts. A token shared by several sequences counts
    once.
    """
    pairs: int
    """Sum of queries times keys, without the half that a causal mask leaves out."""


class RowLayout:
    """Layout with each sequence in a row of its own, padded to the longest. Base class of other layouts."""

    is_packed = False
    """True if all sequences lie in one row."""

    def plan_row(
        self,
        batch: Batch,  # noqa: ARG002 - no place is shared
        *,
        one_follower: bool = False,  # noqa: ARG002 - as above
    ) -> RowPlan | None:
        """Return the plan of a packed row, or None if each token has its own place, in order.

        Args:
            batch: with column `tokens`, on the CPU.
            one_follower: tokens may share a place only if the same token follows each of them.
        """
        return None

    def micro_batches(self, batch: Batch, max_tokens: int, max_sequences: int = 0) -> list[Tensor]:
        """Return the positions of the sequences of each micro-batch. Each sequence occurs once.

        Args:
            batch: the sequences.
            max_tokens: maximum number of computed tokens of a micro-batch; a longer sequence stands alone.
            max_sequences: maximum number of sequences of a micro-batch; 0 sets no limit.
        """
        return batch.micro_batch_indices(max_tokens, max_sequences, self.is_packed)

    def micro_batches_by_rank(
        self, minibatch: Batch, ranks: int, max_tokens: int, max_sequences: int = 0, group_size: int = 1
    ) -> list[list[Tensor]]:
        """Return, for each rank, the positions of the sequences of its micro-batches. Every rank computes the result
        for all ranks.

        Args:
            minibatch: the sequences of one optimizer step.
            ranks: number of shares with about equal costs.
            max_tokens: as in `micro_batches`, like max_sequences.
            max_sequences: of a micro-batch.
            group_size: number of neighbouring sequences that stay in one micro-batch.

        Raises:
            ValueError: the minibatch has part of a group.
        """
        if len(minibatch) % group_size:
            raise ValueError(f"the minibatch has {len(minibatch)} sequences, which are no groups of {group_size}")
        length_GS = minibatch.lengths.view(-1, group_size)
        # Length of a group in a micro-batch. In padded rows this is that of its longest sequence.
        cost_G = length_GS.sum(1) if self.is_packed else group_size * length_GS.amax(1)
        max_groups = max(1, max_sequences // group_size) if max_sequences else 0
        plans = []
        for share in Batch(length_GS.sum(1), {}).balanced_shares(ranks):
            cuts = Batch(cost_G[share], {}).micro_batch_indices(max_tokens, max_groups, self.is_packed)
            plans.append([members_of(share[index], group_size) for index in cuts])
        return plans

    def computed_tokens(self, minibatch: Batch, plans: list[list[Tensor]]) -> ComputedTokens:
        """Return the computed tokens of the micro-batches of all ranks.

        Args:
            minibatch: the sequences of one optimizer step.
            plans: for each rank the positions for its micro-batches, as `micro_batches_by_rank` returned them.
        """
        lengths = [minibatch.lengths[index] for plan in plans for index in plan]
        rows = [(len(length_R), int(length_R.max())) for length_R in lengths]
        return ComputedTokens(
            sum(count * longest for count, longest in rows), sum(count * longest**2 for count, longest in rows)
        )


class EndToEnd(RowLayout):
    """Layout with all sequences end to end in one row."""

    is_packed = True

    def computed_tokens(self, minibatch: Batch, plans: list[list[Tensor]]) -> ComputedTokens:  # noqa: ARG002 - no padding
        """Return the number of tokens of the minibatch, because every token is computed once and nothing is padded."""
        return ComputedTokens(minibatch.num_tokens, int(minibatch.lengths.square().sum()))


PADDED, END_TO_END = RowLayout(), EndToEnd()


def set_layout(model: nn.Module, layout: RowLayout) -> None:
    """Set the layout of the sequences of a model."""
    setattr(model, _MARK, layout)


def layout_of(model: nn.Module) -> RowLayout:
    """Return the layout of a model, or of the model in an engine."""
    return getattr(model, _MARK, PADDED)


def packs(model: nn.Module) -> bool:
    """Return True if a model, or the model in an engine, takes packed sequences."""
    return layout_of(model).is_packed


def members_of(group_G: Tensor, group_size: int) -> Tensor:
    """Return the positions of the sequences of some groups."""
    return (group_G.view(-1, 1) * group_size + torch.arange(group_size)).flatten()
