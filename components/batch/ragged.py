"""Where sequences of different lengths lie when they are put end to end, and how to share them out.

B sequences; N all tokens of a batch end to end; T tokens of the longest sequence.
"""

import heapq
import math
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

Side = Literal["left", "right"]
Row = Sequence[float] | Tensor


class Packed(NamedTuple):
    """Sequences end to end, as the varlen kernels of flash attention take them."""

    tokens: Tensor
    """[N] the column that was packed."""
    positions: Tensor
    """[N] int64, counted from 0 in each sequence."""
    cumulative_lengths: Tensor
    """[B + 1] int32: sequence i is tokens cumulative_lengths[i] to cumulative_lengths[i + 1]."""
    max_length: int
    """Tokens of the longest sequence."""


class Layout:
    """Where the sequences of a batch lie; batches that differ only in their columns share it."""

    def __init__(self, lengths: Tensor, num_tokens: int | None = None) -> None:
        """Take [B] lengths of any integer dtype.

        Args:
            lengths: of each sequence.
            num_tokens: their sum, where they come from another layout; then they are int64, and not checked again.

        Raises:
            ValueError: they are no integers, not one-dimensional, or negative.
        """
        if num_tokens is not None:
            self.lengths, self.num_tokens = lengths, num_tokens
            return
        if lengths.dim() != 1 or not holds_integers(lengths):
            raise ValueError(f"lengths must be [B] integers, but are {lengths.dtype} of shape {list(lengths.shape)}")
        if len(lengths) and int(lengths.min()) < 0:
            raise ValueError(f"lengths[{int(lengths.argmin())}] is {int(lengths.min())}; a length is at least 0")
        self.lengths = lengths.to(torch.int64)
        self.num_tokens = int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def offsets(self) -> Tensor:
        """[B + 1]: sequence i is tokens offsets[i] to offsets[i + 1]."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @cached_property
    def sequence_ids(self) -> Tensor:
        """[N]: the sequence that each token belongs to."""
        ids_B = torch.arange(len(self), device=self.lengths.device)
        return repeated(ids_B, self.lengths, self.num_tokens)

    def positions(self) -> Tensor:
        """[N]: how many tokens of its own sequence each token has before it."""
        begin_N = repeated(self.offsets[:-1], self.lengths, self.num_tokens)
        return torch.arange(self.num_tokens, device=begin_N.device).sub_(begin_N)

    def token_index(self, index_B: Tensor) -> Tensor:
        """Positions of the tokens of the chosen sequences, one sequence after the other."""
        lengths_B = self.lengths[index_B]
        ends_B = lengths_B.cumsum(0)
        num_tokens = int(ends_B[-1]) if len(ends_B) else 0
        # Where each chosen sequence starts here, minus where it will start among the chosen.
        shift_B = self.offsets[:-1][index_B] - (ends_B - lengths_B)
        index_N = repeated(shift_B, lengths_B, num_tokens)
        index_N += torch.arange(num_tokens, device=index_N.device)
        return index_N


def repeated(x_B: Tensor, times_B: Tensor, total: int) -> Tensor:
    """[total] each entry so many times, `total` in all."""
    if x_B.device.type == "cpu":
        # Seven times as fast as torch, whose way is most of what `token_index` would take.
        return torch.from_numpy(np.repeat(x_B.numpy(), times_B.numpy()))
    return x_B.repeat_interleave(times_B, output_size=total)


def token_mask(lengths_B: Tensor, width: int, side: Side) -> Tensor:
    """[B, width] bool, True at tokens. Read row by row, that is the order in which tokens lie end to end."""
    position_T = torch.arange(width, device=lengths_B.device)
    if side == "left":
        return position_T >= width - lengths_B.unsqueeze(1)
    if side == "right":
        return position_T < lengths_B.unsqueeze(1)
    raise ValueError(f"side={side!r}; it must be 'left' or 'right'")


def longest(lengths_B: Tensor) -> int:
    """Tokens of the longest sequence; 0 when there is none."""
    return int(lengths_B.max()) if len(lengths_B) else 0


def micro_batch_indices(
    lengths_B: Tensor, max_tokens: int, max_sequences: int = 0, packing: bool = False
) -> list[Tensor]:
    """Sort by length, and cut so that tokens are at most `max_tokens`, with padding or not, rows `max_sequences`."""
    check_positive("micro-batches of max_tokens =", max_tokens)
    if max_sequences < 0:
        raise ValueError(f"micro-batches of max_sequences = {max_sequences}: set at least 1, or 0 for no limit")
    most_rows = max_sequences or len(lengths_B)
    order_B = torch.argsort(lengths_B, stable=True).cpu()
    starts, rows, tokens = [], 0, 0
    for i, length in enumerate(lengths_B.cpu()[order_B].tolist()):
        rows += 1
        tokens = tokens + length if packing else rows * length
        if rows == 1 or rows > most_rows or tokens > max_tokens:
            starts.append(i)
            rows, tokens = 1, length
    return list(order_B.tensor_split(starts[1:])) if starts else []


def balanced_shares(lengths_B: Tensor, n: int, attention: float = 0.0) -> list[Tensor]:
    """Give the longest sequence left to the rank with the lowest cost, L + attention * L^2, that still has room."""
    check_positive("shares for", n)
    if not 0.0 <= attention < math.inf:
        raise ValueError(f"shares with attention={attention}: set 0 to count tokens, or how much each adds to another")
    base, with_one_more = divmod(len(lengths_B), n)
    lengths = lengths_B.tolist()
    # Whole numbers where tokens are counted, so that no sum is rounded.
    costs = [length + attention * length**2 for length in lengths] if attention else lengths
    shares: list[list[int]] = [[] for _ in range(n)]
    lightest_first: list[tuple[float, int]] = [(0, rank) for rank in range(n)]
    # A longer sequence costs more, whatever attention is.
    for i in torch.argsort(lengths_B, descending=True, stable=True).tolist():
        cost, rank = heapq.heappop(lightest_first)
        while len(shares[rank]) == base and with_one_more == 0:
            cost, rank = heapq.heappop(lightest_first)  # full: it never comes back
        with_one_more -= len(shares[rank]) == base
        shares[rank].append(i)
        if len(shares[rank]) <= base:
            heapq.heappush(lightest_first, (cost + costs[i], rank))
    return [torch.tensor(sorted(share), dtype=torch.int64) for share in shares]


def end_to_end(rows: Sequence[Row]) -> Tensor:
    """[N] the entries of all rows; lists of integers become int64, of floats float32."""
    if any(hasattr(row, "dtype") for row in rows):
        # An empty list has no dtype of its own, and must not make floats of its neighbours' integers.
        return torch.cat([torch.as_tensor(row) for row in rows if hasattr(row, "dtype") or len(row)])
    return torch.tensor(list(chain.from_iterable(rows)))


def joined(parts: Sequence[Tensor], name: str) -> Tensor:
    """The parts of a column one after the other.

    Raises:
        ValueError: two that are not empty differ in dtype or shape.
    """
    # What is empty may carry any dtype: nothing could tell it the right one.
    filled = [part for part in parts if len(part)] or [parts[0]]
    for part in filled:
        if part.dtype != filled[0].dtype or part.shape[1:] != filled[0].shape[1:]:
            raise ValueError(
                f"column {name!r} of concat is {filled[0].dtype} {list(filled[0].shape)} in one batch and "
                f"{part.dtype} {list(part.shape)} in another; make them alike"
            )
    return torch.cat(filled)


def holds_integers(x: Tensor) -> bool:
    """Whether the dtype is one of whole numbers; bools are none."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_positive(what: str, n: int) -> None:
    """ValueError unless n is at least 1."""
    if n < 1:
        raise ValueError(f"{what} {n}: it must be at least 1")
