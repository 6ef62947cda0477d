"""Where sequences of different lengths lie when they are put end to end, and how to share them out.

B sequences; N all tokens of a batch end to end; T tokens of the longest sequence.
"""

import heapq
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Side = Literal["left", "right"]


class Layout:
    """Where the sequences of a batch lie; batches that differ only in their columns share it."""

    def __init__(self, lengths: Tensor) -> None:
        """Take [B] lengths of any integer dtype.

        Raises:
            ValueError: they are no integers, not one-dimensional, or negative.
        """
        if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
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
        return ids_B.repeat_interleave(self.lengths, output_size=self.num_tokens)

    def token_index(self, index_B: Tensor) -> Tensor:
        """Positions of the tokens of the chosen sequences, one sequence after the other."""
        lengths_B = self.lengths[index_B]
        ends_B = lengths_B.cumsum(0)
        num_tokens = int(ends_B[-1]) if len(ends_B) else 0
        # Where each chosen sequence starts here, minus where it will start among the chosen.
        shift_B = self.offsets[:-1][index_B] - (ends_B - lengths_B)
        index_N = shift_B.repeat_interleave(lengths_B, output_size=num_tokens)
        index_N += torch.arange(num_tokens, device=index_N.device)
        return index_N


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


def micro_batch_indices(lengths_B: Tensor, max_tokens: int, max_sequences: int = 0) -> list[Tensor]:
    """Sort by length, and cut so that rows times the longest row is at most `max_tokens`, rows `max_sequences`."""
    check_positive("micro-batches of max_tokens =", max_tokens)
    if max_sequences < 0:
        raise ValueError(f"micro-batches of max_sequences = {max_sequences}: set at least 1, or 0 for no limit")
    most_rows = max_sequences or len(lengths_B)
    order_B = torch.argsort(lengths_B, stable=True).cpu()
    starts, rows = [], 0
    for i, length in enumerate(lengths_B.cpu()[order_B].tolist()):
        rows += 1
        if rows == 1 or rows > most_rows or rows * length > max_tokens:
            starts.append(i)
            rows = 1
    return list(order_B.tensor_split(starts[1:])) if starts else []


def balanced_shares(lengths_B: Tensor, n: int) -> list[Tensor]:
    """Give the longest sequence left to the rank with the fewest tokens that still has room."""
    check_positive("shares for", n)
    base, with_one_more = divmod(len(lengths_B), n)
    lengths = lengths_B.tolist()
    shares: list[list[int]] = [[] for _ in range(n)]
    lightest_first = [(0, rank) for rank in range(n)]
    for i in torch.argsort(lengths_B, descending=True, stable=True).tolist():
        tokens, rank = heapq.heappop(lightest_first)
        while len(shares[rank]) == base and with_one_more == 0:
            tokens, rank = heapq.heappop(lightest_first)  # full: it never comes back
        with_one_more -= len(shares[rank]) == base
        shares[rank].append(i)
        if len(shares[rank]) <= base:
            heapq.heappush(lightest_first, (tokens + lengths[i], rank))
    return [torch.tensor(sorted(share), dtype=torch.int64) for share in shares]


def check_positive(what: str, n: int) -> None:
    """ValueError unless n is at least 1."""
    if n < 1:
        raise ValueError(f"{what} {n}: it must be at least 1")
