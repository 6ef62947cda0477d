"""Parts of a packed row as a variable-length kernel takes them: queries and keys end to end, with their borders.

    sequences   p q r a b    p q r c      row         p q r a b c
                                          queries     p q r | a b       | c
                                          keys        p q r | p q r a b | p q r c

Indices are computed on the CPU once per micro-batch, and serve all layers.

Legend: `U` places of the row, `P` parts of sequences, `N` entries that are picked, `W` numbers of an entry, `H` heads,
`D` size of a head.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag, pad

from components.batch.ragged import repeated, sent
from components.models.packing.packed_row import PackedRow


class Places:
    """Places of a row from which entries are picked, on the device of the row."""

    def __init__(self, place_N: Tensor, row: PackedRow) -> None:
        """
        Args:
            place_N: [N] int64 on the CPU. Places may occur several times.
            row: the row, or one whose number of places and device are the same.
        """
        self._host = place_N, row.places
        self._device = row.device
        self.place_N = sent(place_N, row.device)

    @cached_property
    def inverse(self) -> tuple[Tensor, Tensor]:
        """[N] indices of the entries in the order of their places, and [U] start of each place's entries.

        The gradient of torch's `embedding` would sort the places again for each layer and for each of queries, keys and
        values.
        """
        place_N, places = self._host
        count_U = torch.bincount(place_N, minlength=places)
        begin_U = count_U.cumsum(0) - count_U
        return sent(place_N.argsort(stable=True), self._device), sent(begin_U, self._device)


class KernelParts(NamedTuple):
    """Queries and keys of a row, part after part. None instead of places: those of the row in their order."""

    queries: Places | None
    keys: Places | None
    """Each part attends to its whole sequence up to the end of the part."""
    query_U: Tensor | None
    """[U] int64, index of one query for each place of the row."""
    query_borders: Tensor
    """[P + 1] int32, cumulative numbers of queries."""
    key_borders: Tensor
    """[P + 1] int32, cumulative numbers of keys."""
    most_queries: int
    """Number of queries of the longest part."""
    most_keys: int


_PARTS: WeakKeyDictionary[PackedRow, KernelParts] = WeakKeyDictionary()


def kernel_parts(row: PackedRow) -> KernelParts:
    """Return the parts of a row, which are computed at the first call."""
    if row not in _PARTS:
        _PARTS[row] = _kernel_parts(row)
    return _PARTS[row]


def _kernel_parts(row: PackedRow) -> KernelParts:
    sequence_P, first_P, end_P = torch.tensor(list(row.parts())).unbind(1)
    # In the order of the row, queries and outputs need no copy, unless a place is in several parts.
    order_P = _places(row, sequence_P, first_P, first_P + 1).argsort(stable=True)
    sequence_P, first_P, end_P = sequence_P[order_P], first_P[order_P], end_P[order_P]
    query_place_N = _places(row, sequence_P, first_P, end_P)
    key_place_N = _places(row, sequence_P, torch.zeros_like(first_P), end_P)
    queries = _places_unless_in_order(query_place_N, row)
    query_U: Tensor | None = None
    if queries is not None:
        query_U = torch.empty(row.places, dtype=torch.int64)
        query_U[query_place_N] = torch.arange(len(query_place_N))
        query_U = sent(query_U, row.device)
    count_P = end_P - first_P
    return KernelParts(
        queries,
        _places_unless_in_order(key_place_N, row),
        query_U,
        _borders(count_P, row),
        _borders(end_P, row),
        int(count_P.max()),
        int(end_P.max()),
    )


def _places_unless_in_order(place_N: Tensor, row: PackedRow) -> Places | None:
    if torch.equal(place_N, torch.arange(row.places)):
        return None
    return Places(place_N, row)


def _places(row: PackedRow, sequence_P: Tensor, first_P: Tensor, end_P: Tensor) -> Tensor:
    """Return the places of the tokens from `first_P` to `end_P` of these sequences, end to end."""
    count_P = end_P - first_P
    border_P = count_P.cumsum(0)
    # Index of a token in the batch, minus its index in the result.
    shift_P = (row.lengths.cumsum(0) - row.lengths)[sequence_P] + first_P - (border_P - count_P)
    total = int(border_P[-1])
    token_N = torch.arange(total) + repeated(shift_P, count_P, total)
    if row.plan is None:
        return token_N
    return row.plan.place_N[token_N]


def _borders(count_P: Tensor, row: PackedRow) -> Tensor:
    return sent(pad(count_P.cumsum(0), (1, 0)).to(torch.int32), row.device)


def picked(x_UHD: Tensor, places: Places | None) -> Tensor:
    """Return the entries at these places, [N, H, D]. None: return all of them, unchanged."""
    if places is None:
        return x_UHD
    return _Picked.apply(x_UHD.flatten(1), places).unflatten(1, x_UHD.shape[1:])


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_UW: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return x_UW.index_select(0, places.place_N)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator's type loses ctx
        ctx: Any, grad_NW: Tensor
    ) -> tuple[Tensor, None]:
        entry_N, begin_U = ctx.places.inverse
        # One kernel adds up the gradients of each place in a fixed order, in float32 for half precision.
        return embedding_bag(entry_N, grad_NW.contiguous(), begin_U, mode="sum"), None
