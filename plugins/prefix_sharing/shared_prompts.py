"""Sequences that begin alike are computed once as far as they are alike: a group's prompt is read once.

    sequences   p q r a b    p q r c          row         p q r a b c
                                              positions   0 1 2 3 4 3

A token's state depends on nothing but the tokens up to it, so what sequences have in common has the same states in all
of them. Every layer works on the row; in attention each sequence's own tokens see the sequence whole (packed_row.py).

Legend: `B` sequences, `N` all their tokens end to end, `U` places of the row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from components.batch import Batch
from components.models.packing.layout import ComputedTokens, EndToEnd, Part, RowPlan
from components.models.routers import find_routers

SHORTEST = 4
"""Tokens that sequences have in common, at least: with fewer it takes longer to lay them out than to compute them."""

MOST_SEEN = 2**24
"""Queries times keys: above it a whole sequence is queries, as a mask would take more memory than is saved."""


@dataclass(frozen=True)
class Run:
    """Sequences that begin with the same tokens."""

    members: list[int]
    """Their positions in the batch."""
    shared: int
    """Tokens that all of them begin with; each has one of its own at least. 0 where there is one member."""

    @property
    def saved(self) -> int:
        """Tokens that need not be computed."""
        return self.shared * (len(self.members) - 1)


class SharedPrompts(EndToEnd):
    """All sequences in one row, which has once what a run of them begins with."""

    def __init__(self, shortest: int = SHORTEST) -> None:
        """
        Args:
            shortest: minimum number of tokens that the sequences of a run have in common.
        """
        self.shortest = shortest
        self._planned: tuple[Batch, list[Run]] | None = None
        """The minibatch that was planned last and its runs, which take a sort of its tokens."""

    def plan_row(self, batch: Batch, *, one_follower: bool = False) -> RowPlan | None:
        """Return the plan of a packed row, or None if nothing is saved."""
        runs = runs_of(batch, self.shortest, one_follower=one_follower)
        return row_plan(batch, runs) if saved_by(runs) else None

    def micro_batches(self, batch: Batch, max_tokens: int, max_sequences: int = 0) -> list[Tensor]:
        """Return the positions for micro-batches, whose rows have what a run shares once."""
        runs = runs_of(batch, self.shortest)
        if saved_by(runs):
            return shared_micro_batches(batch.lengths, runs, max_tokens, max_sequences)
        return super().micro_batches(batch, max_tokens, max_sequences)

    def micro_batches_by_rank(
        self, minibatch: Batch, ranks: int, max_tokens: int, max_sequences: int = 0, group_size: int = 1
    ) -> list[list[Tensor]]:
        """Return for each rank the positions for its micro-batches; groups that a loss compares are not parted."""
        runs = runs_of(minibatch, self.shortest) if group_size == 1 else []
        self._planned = minibatch, runs
        if not saved_by(runs):
            return super().micro_batches_by_rank(minibatch, ranks, max_tokens, max_sequences, group_size)
        lengths_B = minibatch.lengths
        parts = shares_of_runs(lengths_B, runs, ranks)
        return [shared_micro_batches(lengths_B, part, max_tokens, max_sequences) for part in parts]

    def computed_tokens(self, minibatch: Batch, plans: list[list[Tensor]]) -> ComputedTokens:
        """Return what the micro-batches of all ranks compute: the tokens that the members of a run share once in each
        micro-batch.
        """
        places, pairs = super().computed_tokens(minibatch, plans)
        planned, runs = self._planned or (None, [])
        if planned is not minibatch:
            raise ValueError("the minibatch is not the one that was planned last; call micro_batches_by_rank before")
        run_B = torch.zeros(len(minibatch), dtype=torch.int64)
        for number, run in enumerate(runs):
            run_B[run.members] = number
        shared_R = torch.tensor([run.shared for run in runs])
        for index in itertools.chain.from_iterable(plans) if runs else ():
            number_R, count_R = run_B[index].unique(return_counts=True)
            repeated_R = count_R - 1
            places -= int((repeated_R * shared_R[number_R]).sum())
            pairs -= int((repeated_R * shared_R[number_R].square()).sum())
        return ComputedTokens(places, pairs)


def layout_for(model: nn.Module) -> SharedPrompts | None:
    """Return the layout of a model, or None for a mixture of experts: the loss that balances experts counts every token
    that is routed, so that each is computed.
    """
    return None if find_routers(model).modules else SharedPrompts()


def row_plan(batch: Batch, runs: list[Run]) -> RowPlan:
    """Return the plan of a row that has what the members of each run share once."""
    lengths = batch.lengths.tolist()
    parts = [Part(run.members[0], 0, run.shared) for run in runs if run.shared]
    for run in runs:
        for member in run.members:
            length = lengths[member]
            is_long = (length - run.shared) * length > MOST_SEEN
            parts.append(Part(member, 0 if is_long else run.shared, length))
    return RowPlan(*shared_places(batch, runs), parts)


def runs_of(batch: Batch, shortest: int = SHORTEST, *, one_follower: bool = False) -> list[Run]:
    """Which sequences are laid out together, by their column `tokens`, so that much is saved; each is in one run.

    Args:
        batch: of the sequences.
        shortest: tokens that those of a run have in common, at least.
        one_follower: what is shared is followed by the same token in all of its run.
    """
    rows = [row.numpy() for row in batch["tokens"].cpu().to(torch.int64).split(batch.lengths.tolist())]
    # In bytes of this order numbers that are not negative compare as they do themselves.
    order = sorted(range(len(rows)), key=[row.astype(">i8").tobytes() for row in rows].__getitem__)
    common = [max(0, _common(rows[i], rows[j], one_follower)) for i, j in pairwise(order)]
    return _cut(order, common, shortest)


def _common(one: np.ndarray, other: np.ndarray, one_follower: bool) -> int:
    """Tokens that two begin with; of two that differ nowhere all but one."""
    most = min(len(one), len(other))
    differs = one[:most] != other[:most]
    if not differs.any():
        return most - 1
    return int(differs.argmax()) - one_follower


def _cut(order: list[int], common: list[int], shortest: int) -> list[Run]:
    """Neighbours that are together, given what each has in common with the next.

    From those that have most in common: two stretches become one where that saves at least as much as both by
    themselves.
    """
    stretches = {i: [Run([member], 0)] for i, member in enumerate(order)}
    begins = list(range(len(order)))  # of the stretch that ends here
    ends = list(range(len(order)))  # of the stretch that begins here
    for i in sorted(range(len(common)), key=common.__getitem__, reverse=True):
        first, last = begins[i], ends[i + 1]
        apart = stretches.pop(first) + stretches.pop(i + 1)
        together = Run(order[first : last + 1], common[i])
        is_better = common[i] >= shortest and together.saved >= saved_by(apart)
        stretches[first] = [together] if is_better else apart
        begins[last], ends[first] = first, last
    return [run for _, runs in sorted(stretches.items()) for run in runs]


def saved_by(runs: Iterable[Run]) -> int:
    """Tokens that need not be computed."""
    return sum(run.saved for run in runs)


def shared_places(batch: Batch, runs: list[Run]) -> tuple[Tensor, Tensor]:
    """Place the tokens of `batch` in a row, run after run: what its members share, then what each has for itself.

    Returns:
        [N] int64, of each token its place; [U] int64, of each place the first token that lies there.
    """
    shared_B = torch.zeros(len(batch), dtype=torch.int64)
    start_B, own_B = torch.zeros_like(shared_B), torch.zeros_like(shared_B)
    lengths, end = batch.lengths.tolist(), 0
    for run in runs:
        start_B[run.members] = end
        shared_B[run.members] = run.shared
        end += run.shared
        for member in run.members:
            own_B[member] = end - run.shared
            end += lengths[member] - run.shared
    sequence_N, position_N = batch.sequence_ids.cpu(), batch.packed().positions.cpu()
    is_shared_N = position_N < shared_B[sequence_N]
    place_N = torch.where(is_shared_N, start_B[sequence_N], own_B[sequence_N]) + position_N
    first_U = torch.full((end,), len(place_N)).scatter_reduce(0, place_N, torch.arange(len(place_N)), "amin")
    return place_N.to(batch.lengths.device), first_U.to(batch.lengths.device)


def shared_micro_batches(lengths_B: Tensor, runs: list[Run], max_tokens: int, max_sequences: int = 0) -> list[Tensor]:
    """Positions for micro-batches whose rows have at most `max_tokens`, together every member of the runs once.

    A run that does not fit is cut, and what it shares is then in both parts. A sequence longer than the budget stands
    alone.

    Args:
        lengths_B: tokens of each sequence.
        runs: which are laid out together.
        max_tokens: of a row.
        max_sequences: of a micro-batch; 0 sets no limit.
    """
    parts: list[list[int]] = []
    tokens = 0
    lengths = lengths_B.tolist()
    for run in runs:
        has_shared = False
        for member in run.members:
            added = lengths[member] - run.shared * has_shared
            is_full = bool(parts) and len(parts[-1]) == max_sequences
            if not parts or is_full or tokens + added > max_tokens:
                parts.append([])
                tokens, added = 0, lengths[member]
            parts[-1].append(member)
            tokens += added
            has_shared = True
    return [torch.tensor(part) for part in parts]


def shares_of_runs(lengths_B: Tensor, runs: list[Run], ranks: int) -> list[list[Run]]:
    """Runs for each rank, such that all compute about as many tokens; few of them are cut, a part for each rank."""
    if len(runs) < 4 * ranks:
        parts = [part for run in runs for part in torch.tensor(run.members).tensor_split(ranks)]
        shared = [run.shared for run in runs for _ in range(ranks)]
        runs = [Run(part.tolist(), shared[i]) for i, part in enumerate(parts) if len(part)]
    cost_R = torch.tensor([int(lengths_B[run.members].sum()) - run.saved for run in runs])
    return [[runs[i] for i in share] for share in Batch(cost_R).balanced_shares(ranks)]
