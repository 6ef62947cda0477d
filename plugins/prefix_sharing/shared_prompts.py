"""Compute the common prefix of several sequences once, such as the prompt of a group.

    sequences   p q r a b    p q r c          row         p q r a b c
                                              positions   0 1 2 3 4 3

The state of a token depends only on the tokens up to it, so a common prefix has the same states in all sequences. Every
layer works on the row. In attention, the remaining tokens of each sequence attend to the full sequence (packed_row.py).

Legend: `B` sequences, `N` tokens of all sequences end to end, `U` places of the row.
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
"""Minimum number of common tokens. With fewer tokens, the layout takes longer than computing them again."""

MOST_SEEN = 2**24
"""Maximum of queries times keys for a sequence with a shared prefix. Beyond it all tokens of the sequence are queries,
because the attention mask would take more memory than sharing saves."""


@dataclass(frozen=True)
class Run:
    """Sequences with a common prefix."""

    members: list[int]
    """Positions of the sequences in the batch."""
    shared: int
    """Number of common tokens. Each sequence has at least one more token. 0 for a single member."""

    @property
    def saved(self) -> int:
        """Number of tokens that need not be computed."""
        return self.shared * (len(self.members) - 1)


class SharedPrompts(EndToEnd):
    """Layout with all sequences in one row, in which the common prefix of a run occurs once."""

    def __init__(self, shortest: int = SHORTEST) -> None:
        """
        Args:
            shortest: minimum number of common tokens of a run.
        """
        self.shortest = shortest
        self._planned: tuple[Batch, list[Run]] | None = None
        """The minibatch that was planned last and its runs, which take a sort of its tokens."""

    def plan_row(self, batch: Batch, *, one_follower: bool = False) -> RowPlan | None:
        """Return the plan of a packed row, or None if nothing is saved."""
        runs = runs_of(batch, self.shortest, one_follower=one_follower)
        if not saved_tokens(runs):
            return None
        return row_plan(batch, runs)

    def micro_batches(self, batch: Batch, max_tokens: int, max_sequences: int = 0) -> list[Tensor]:
        """Return the positions of the sequences of each micro-batch, in whose rows a common prefix occurs once."""
        runs = runs_of(batch, self.shortest)
        if saved_tokens(runs):
            return shared_micro_batches(batch.lengths, runs, max_tokens, max_sequences)
        return super().micro_batches(batch, max_tokens, max_sequences)

    def micro_batches_by_rank(
        self, minibatch: Batch, ranks: int, max_tokens: int, max_sequences: int = 0, group_size: int = 1
    ) -> list[list[Tensor]]:
        """Return the positions of the sequences of each micro-batch, for each rank. Groups that a loss compares stay
        together.
        """
        # Balancing by runs would separate the groups that must stay together, so prefixes are not shared then.
        runs: list[Run] = []
        if group_size == 1:
            runs = runs_of(minibatch, self.shortest)
        self._planned = minibatch, runs
        if not saved_tokens(runs):
            return super().micro_batches_by_rank(minibatch, ranks, max_tokens, max_sequences, group_size)
        lengths_B = minibatch.lengths
        parts = shares_of_runs(lengths_B, runs, ranks)
        return [shared_micro_batches(lengths_B, part, max_tokens, max_sequences) for part in parts]

    def computed_tokens(self, minibatch: Batch, plans: list[list[Tensor]]) -> ComputedTokens:
        """Return the computed tokens of the micro-batches of all ranks. Tokens that members of a run share count once
        per micro-batch.
        """
        places, pairs = super().computed_tokens(minibatch, plans)
        planned, runs = self._planned or (None, [])
        if planned is not minibatch:
            raise ValueError("the minibatch is not the one that was planned last; call micro_batches_by_rank before")
        run_B = torch.zeros(len(minibatch), dtype=torch.int64)
        for number, run in enumerate(runs):
            run_B[run.members] = number
        shared_R = torch.tensor([run.shared for run in runs])
        if not runs:
            return ComputedTokens(places, pairs)
        for index in itertools.chain.from_iterable(plans):
            number_R, count_R = run_B[index].unique(return_counts=True)
            repeated_R = count_R - 1
            places -= int((repeated_R * shared_R[number_R]).sum())
            pairs -= int((repeated_R * shared_R[number_R].square()).sum())
        return ComputedTokens(places, pairs)


def layout_for(model: nn.Module) -> SharedPrompts | None:
    """Return the layout of a model, or None for a mixture of experts.

    The loss that balances experts counts every routed token, so that each token has to be computed.
    """
    if find_routers(model).modules:
        return None
    return SharedPrompts()


def row_plan(batch: Batch, runs: list[Run]) -> RowPlan:
    """Return the plan of a row in which the common prefix of each run occurs once."""
    lengths = batch.lengths.tolist()
    parts = [Part(run.members[0], 0, run.shared) for run in runs if run.shared]
    for run in runs:
        for member in run.members:
            length = lengths[member]
            start = run.shared
            if (length - run.shared) * length > MOST_SEEN:
                start = 0
            parts.append(Part(member, start, length))
    return RowPlan(*shared_places(batch, runs), parts)


def runs_of(batch: Batch, shortest: int = SHORTEST, *, one_follower: bool = False) -> list[Run]:
    """Group sequences into runs by their column `tokens`, such that many tokens are saved. Each sequence is in one run.

    Args:
        batch: the sequences.
        shortest: minimum number of common tokens of a run.
        one_follower: True if the common prefix must be followed by the same token in all sequences of a run.
    """
    rows = [row.numpy() for row in batch["tokens"].to(torch.int64).split(batch.lengths.tolist())]
    # Big-endian bytes of non-negative numbers sort like the numbers. Sorting puts common prefixes next to each other.
    order = sorted(range(len(rows)), key=[row.astype(">i8").tobytes() for row in rows].__getitem__)
    common = [max(0, _common(rows[i], rows[j], one_follower)) for i, j in pairwise(order)]
    return _cut(order, common, shortest)


def _common(one: np.ndarray, other: np.ndarray, one_follower: bool) -> int:
    """Return the number of common first tokens of two sequences, leaving at least one token in each of them."""
    most = min(len(one), len(other))
    differs = one[:most] != other[:most]
    if not differs.any():
        return most - 1
    return int(differs.argmax()) - one_follower


def _cut(order: list[int], common: list[int], shortest: int) -> list[Run]:
    """Cut sorted sequences into runs.

    Neighbors are merged in the order of the length of their common prefix. Two stretches become one run if that saves
    at least as many tokens as both stretches by themselves.

    Args:
        order: positions of the sequences, sorted by their tokens.
        common: number of common tokens of each sequence with the next one.
        shortest: minimum number of common tokens of a run.
    """
    stretches = {i: [Run([member], 0)] for i, member in enumerate(order)}
    begins = list(range(len(order)))  # first index of the stretch that ends at this index
    ends = list(range(len(order)))  # last index of the stretch that begins at this index
    for i in sorted(range(len(common)), key=common.__getitem__, reverse=True):
        first = begins[i]
        last = ends[i + 1]
        apart = stretches.pop(first) + stretches.pop(i + 1)
        together = Run(order[first : last + 1], common[i])
        stretches[first] = apart
        if common[i] >= shortest and together.saved >= saved_tokens(apart):
            stretches[first] = [together]
        begins[last] = first
        ends[first] = last
    return [run for _, runs in sorted(stretches.items()) for run in runs]


def saved_tokens(runs: Iterable[Run]) -> int:
    """Return the number of tokens that need not be computed."""
    return sum(run.saved for run in runs)


def shared_places(batch: Batch, runs: list[Run]) -> tuple[Tensor, Tensor]:
    """Place the tokens of `batch` in a row, run after run: the common prefix, then the rest of each member.

    Returns:
        [N] int64, the place of each token; [U] int64, the first token at each place.
    """
    shared_B = torch.zeros(len(batch), dtype=torch.int64)
    start_B = torch.zeros_like(shared_B)
    # Place of a token outside of the prefix = its position + this offset.
    offset_B = torch.zeros_like(shared_B)
    lengths = batch.lengths.tolist()
    end = 0
    for run in runs:
        start_B[run.members] = end
        shared_B[run.members] = run.shared
        end += run.shared
        for member in run.members:
            offset_B[member] = end - run.shared
            end += lengths[member] - run.shared
    sequence_N = batch.sequence_ids
    position_N = batch.packed().positions
    is_shared_N = position_N < shared_B[sequence_N]
    place_N = torch.where(is_shared_N, start_B[sequence_N], offset_B[sequence_N]) + position_N
    first_U = torch.full((end,), len(place_N)).scatter_reduce(0, place_N, torch.arange(len(place_N)), "amin")
    return place_N, first_U


def shared_micro_batches(lengths_B: Tensor, runs: list[Run], max_tokens: int, max_sequences: int = 0) -> list[Tensor]:
    """Return the positions for micro-batches whose rows have at most `max_tokens`. They have every member of the runs
    once.

    A run that does not fit is cut, and both parts then have the common prefix. A sequence longer than the limit is a
    micro-batch of its own.

    Args:
        lengths_B: number of tokens of each sequence.
        runs: runs whose members are laid out together.
        max_tokens: maximum number of tokens of a row.
        max_sequences: maximum number of sequences of a micro-batch; 0 sets no limit.
    """
    parts: list[list[int]] = []
    tokens = 0
    lengths = lengths_B.tolist()
    for run in runs:
        has_shared = False
        for member in run.members:
            added = lengths[member]
            if has_shared:
                added -= run.shared
            is_full = bool(parts) and len(parts[-1]) == max_sequences
            if not parts or is_full or tokens + added > max_tokens:
                parts.append([])
                tokens = 0
                added = lengths[member]
            parts[-1].append(member)
            tokens += added
            has_shared = True
    return [torch.tensor(part) for part in parts]


def shares_of_runs(lengths_B: Tensor, runs: list[Run], ranks: int) -> list[list[Run]]:
    """Return runs for each rank, with about the same number of tokens to compute. Few runs are cut into parts for each
    rank.
    """
    if len(runs) < 4 * ranks:
        parts = [part for run in runs for part in torch.tensor(run.members).tensor_split(ranks)]
        shared = [run.shared for run in runs for _ in range(ranks)]
        runs = [Run(part.tolist(), shared[i]) for i, part in enumerate(parts) if len(part)]
    cost_R = torch.tensor([int(lengths_B[run.members].sum()) - run.saved for run in runs])
    return [[runs[i] for i in share] for share in Batch(cost_R).balanced_shares(ranks)]
