"""Layout of sequences of different lengths end to end, and their distribution over micro-batches and ranks.

Shape suffixes: B sequences; N all tokens of a batch end to end; T tokens of the longest sequence.
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
    """Sequences end to end, in the format of flash attention's varlen kernels."""

    tokens: Tensor
    """[N] the column that was packed."""
    positions: Tensor
    """[N] int64 position of each token in its sequence, from 0."""
    cumulative_lengths: Tensor
    """[B + 1] int32: sequence i is tokens cumulative_lengths[i] to cumulative_lengths[i + 1]."""
    max_length: int
    """Number of tokens of the longest sequence."""


class Layout:
    """Layout of the sequences of a batch: their lengths and offsets."""

    def __init__(self, lengths: Tensor, num_tokens: int | None = None) -> None:
        """Check the lengths.

        Args:
            lengths: [B] number of tokens of each sequence, of any integer dtype.
            num_tokens: sum of the lengths, if they come from another layout. They must then be int64 and are not
                checked again.

        Raises:
            ValueError: the lengths are not integers, not one-dimensional, or negative.
        """
        if num_tokens is not None:
            self.lengths = lengths
            self.num_tokens = num_tokens
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
        """Offsets [B + 1]: sequence i is tokens offsets[i] to offsets[i + 1]."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @cached_property
    def sequence_ids(self) -> Tensor:
        """Index [N] of the sequence that each token belongs to."""
        ids_B = torch.arange(len(self), device=self.lengths.device)
        return repeated(ids_B, self.lengths, self.num_tokens)

    def positions(self) -> Tensor:
        """Return the position [N] of each token in its sequence, from 0."""
        begin_N = repeated(self.offsets[:-1], self.lengths, self.num_tokens)
        return torch.arange(self.num_tokens, device=begin_N.device).sub_(begin_N)

    def token_index(self, index_B: Tensor) -> Tensor:
        """Return the positions of the tokens of the selected sequences, one sequence after the other."""
        lengths_B = self.lengths[index_B]
        ends_B = lengths_B.cumsum(0)
        num_tokens = int(lengths_B.sum())
        # Start of each selected sequence in this batch, minus its start in the result.
        shift_B = self.offsets[:-1][index_B] - (ends_B - lengths_B)
        index_N = repeated(shift_B, lengths_B, num_tokens)
        index_N += torch.arange(num_tokens, device=index_N.device)
        return index_N


def repeated(x_B: Tensor, times_B: Tensor, total: int) -> Tensor:
    """Repeat entry i of x times_B[i] times, which is torch.repeat_interleave; `total` is the sum of times_B."""
    if x_B.device.type == "cpu":
        # numpy is seven times as fast as torch here, where `token_index` would spend most of its time.
        return torch.from_numpy(np.repeat(x_B.numpy(), times_B.numpy()))
    return x_B.repeat_interleave(times_B, output_size=total)


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device. The host does not wait for a copy to a GPU."""
    is_copied_to_gpu = x.device.type == "cpu" and torch.device(device).type == "cuda"
    # The host waits for copies from memory that is not pinned. A copy to the host must be complete on return.
    return x.pin_memory().to(device, non_blocking=True) if is_copied_to_gpu else x.to(device)


def token_mask(lengths_B: Tensor, width: int, side: Side) -> Tensor:
    """Return a mask [B, width], True at tokens. In row-major order its True entries are the tokens end to end."""
    position_T = torch.arange(width, device=lengths_B.device)
    if side == "left":
        return position_T >= width - lengths_B.unsqueeze(1)
    if side == "right":
        return position_T < lengths_B.unsqueeze(1)
    raise ValueError(f"side={side!r}; it must be 'left' or 'right'")


def longest(lengths_B: Tensor) -> int:
    """Return the number of tokens of the longest sequence; 0 without a sequence."""
    if not len(lengths_B):  # max raises an error for an empty tensor
        return 0
    return int(lengths_B.max())


def micro_batch_indices(
    lengths_B: Tensor, max_tokens: int, max_sequences: int = 0, packing: bool = False
) -> list[Tensor]:
    """Return the positions of each micro-batch; see `Batch.micro_batch_indices`."""
    check_positive("micro-batches of max_tokens =", max_tokens)
    if max_sequences < 0:
        raise ValueError(f"micro-batches of max_sequences = {max_sequences}: set at least 1, or 0 for no limit")
    most_rows = max_sequences or len(lengths_B)
    # Stable, so that all ranks and resumed runs get the same micro-batches.
    order_B = torch.argsort(lengths_B, stable=True).cpu()
    starts: list[int] = []
    rows = 0
    tokens = 0
    for i, length in enumerate(lengths_B.cpu()[order_B].tolist()):
        rows += 1
        if packing:
            tokens += length
        else:  # lengths ascend, so this row is the longest one
            tokens = rows * length
        if rows == 1 or rows > most_rows or tokens > max_tokens:
            starts.append(i)
            rows = 1
            tokens = length
    # Without sequences, `tensor_split` returns a single empty tensor, which is no micro-batch.
    return [index_R for index_R in order_B.tensor_split(starts[1:]) if len(index_R)]


def balanced_shares(lengths_B: Tensor, n: int, attention: float = 0.0) -> list[Tensor]:
    """Return the positions of each rank; see `Batch.balanced_shares`."""
    check_positive("shares for", n)
    if not 0.0 <= attention < math.inf:
        raise ValueError(f"shares with attention={attention}: set 0 to count tokens, or the cost of a pair of tokens")
    base, with_one_more = divmod(len(lengths_B), n)
    # Without attention the costs stay integers, so that no sum is rounded.
    costs = lengths_B.tolist()
    if attention:
        costs = [length + attention * length**2 for length in costs]
    shares: list[list[int]] = [[] for _ in range(n)]
    lightest_first: list[tuple[float, int]] = [(0, rank) for rank in range(n)]
    # A longer sequence costs more for every value of attention, so sorting by length sorts by cost.
    for i in torch.argsort(lengths_B, descending=True, stable=True).tolist():
        cost, rank = heapq.heappop(lightest_first)
        while len(shares[rank]) == base and with_one_more == 0:
            cost, rank = heapq.heappop(lightest_first)  # a full rank is dropped from the heap and not returned to it
        with_one_more -= len(shares[rank]) == base
        shares[rank].append(i)
        if len(shares[rank]) <= base:
            heapq.heappush(lightest_first, (cost + costs[i], rank))
    return [torch.tensor(sorted(share), dtype=torch.int64) for share in shares]


def end_to_end(rows: Sequence[Row]) -> Tensor:
    """Concatenate rows to [N]. Lists of integers become int64, lists of floats become float32."""
    if any(hasattr(row, "dtype") for row in rows):
        # Empty lists are left out: torch would make a float tensor of them, and the integers of other rows floats too.
        return torch.cat([torch.as_tensor(row) for row in rows if hasattr(row, "dtype") or len(row)])
    return torch.tensor(list(chain.from_iterable(rows)))


def joined(parts: Sequence[Tensor], name: str) -> Tensor:
    """Concatenate the parts of a column.

    Raises:
        ValueError: two parts that are not empty differ in dtype or shape.
    """
    # An empty part may have any dtype, because it has no value from which the dtype could be inferred.
    filled = [part for part in parts if len(part)] or [parts[0]]
    for part in filled:
        if part.dtype != filled[0].dtype or part.shape[1:] != filled[0].shape[1:]:
            raise ValueError(
                f"column {name!r} of concat is {filled[0].dtype} {list(filled[0].shape)} in one batch and "
                f"{part.dtype} {list(part.shape)} in another; make them alike"
            )
    return torch.cat(filled)


def holds_integers(x: Tensor) -> bool:
    """Return True if the dtype is an integer dtype. bool is not."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_positive(purpose: str, n: int) -> None:
    """Raise a ValueError unless n is at least 1."""
    if n < 1:
        raise ValueError(f"{purpose} {n}: it must be at least 1")
