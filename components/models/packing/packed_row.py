"""Rearrangement of a packed row for attention, which computes each sequence separately.

Every token is a query once. If sequences share tokens, the shared tokens are one part, and the rest of each sequence is
another part that attends to the whole sequence. Without a kernel for sequences of different lengths, sequences of
similar length are the rows of a rectangle, so that there are few calls. Padding at the end of a row changes nothing,
because a token does not attend to later ones.

Legend: `N` tokens of the sequences end to end, `U` places of the row, `P` parts of sequences, `F`
fields of all rectangles, `R` parts of a rectangle, `S` queries and `T` keys of each, `H` heads, `D` size of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from components.batch import Batch
from components.batch.ragged import sent
from components.models.packing.layout import Part, RowPlan
from components.models.packing.row_slices import WHOLE_ROWS, RowSlices


class Rectangles(NamedTuple):
    """Indices for converting a row to rectangles and back."""

    shapes: list[tuple[int, int, int]]
    """R, S and T of each rectangle."""
    query_place_F: Tensor | None
    """[F] int64, place in the row of each field of the queries. Fields without a token have any place. None: the fields
    of queries and keys are in the order of the row."""
    key_place_F: Tensor | None
    """[F] int64, place in the row of each field of the keys, or None."""
    field_U: Tensor | None
    """[U] int64, field of the queries for each place of the row, or None."""


class PackedRow:
    """Places of sequences in a row. It is a plain object, so that no library searches it for tensors."""

    slices: RowSlices = WHOLE_ROWS
    """Part of the row that each rank computes."""

    def __init__(self, batch: Batch, plan: RowPlan | None = None) -> None:
        """
        Args:
            batch: sequences, none of which is empty.
            plan: plan of a row with shared places. None: the sequences lie end to end.
        """
        host = batch.host
        self.lengths = host.lengths
        """[B] on the CPU, where indices are computed."""
        self.device = batch.lengths.device
        self.plan = plan
        """Plan of the row, on the CPU. None: the tokens are in order."""
        self.places = batch.num_tokens if plan is None else len(plan.first_U)
        """U: number of places of the row."""
        packed = host.packed()
        self.borders, self.longest = sent(packed.cumulative_lengths, self.device), packed.max_length

    def parts(self) -> Iterable[Part]:
        """Return the parts of the queries. Every place of the row is in at least one."""
        if self.plan is not None:
            return self.plan.parts
        return [Part(sequence, 0, length) for sequence, length in enumerate(self.lengths.tolist())]

    @cached_property
    def rectangles(self) -> Rectangles:
        """Rectangles of parts that begin at the same position, sorted by length with the longest first.

        The padding of a row in a rectangle is at most a quarter of the row's width, or 8 tokens if that is more.
        """
        parts = sorted(self.parts(), key=lambda part: (part.first, part.end), reverse=True)
        shapes: list[tuple[int, int, int]] = []
        # No part begins at -1, so the first part opens a rectangle.
        first, width = -1, 0
        for part in parts:
            if part.first == first and width - part.end <= max(8, (width - first) // 4):
                shapes[-1] = (shapes[-1][0] + 1, *shapes[-1][1:])
            else:
                first, width = part.first, part.end
                shapes.append((1, width - first, width))
        # A single rectangle in the order of the row is a view of it and needs no copy.
        in_order = [part.sequence for part in parts] == list(range(len(parts)))
        if in_order and len(shapes) == 1 and parts[0].end == parts[-1].end:
            return Rectangles(shapes, None, None, None)
        sequence_P, first_P, end_P = torch.tensor(parts).unbind(1)
        width_P = torch.tensor([keys for rows, _, keys in shapes for _ in range(rows)])
        start_P = (self.lengths.cumsum(0) - self.lengths)[sequence_P]
        query_place_F, is_token_F = self._fields(start_P, first_P, end_P, width_P)
        field_U = torch.empty(self.places, dtype=torch.int64)
        field_U[query_place_F[is_token_F]] = is_token_F.nonzero().squeeze(1)
        key_place_F = query_place_F
        if self.plan is not None:
            key_place_F, _ = self._fields(start_P, torch.zeros_like(first_P), end_P, width_P)
        return Rectangles(shapes, *(sent(index, self.device) for index in (query_place_F, key_place_F, field_U)))

    def _fields(self, start_P: Tensor, first_P: Tensor, end_P: Tensor, width_P: Tensor) -> tuple[Tensor, Tensor]:
        """Return [F] int64 places of the fields from `first_P` up to `width_P`, and [F] bool, True for fields with a
        token.
        """
        count_P = width_P - first_P
        row_F = torch.arange(len(count_P)).repeat_interleave(count_P)
        column_F = torch.arange(len(row_F)) - (count_P.cumsum(0) - count_P - first_P)[row_F]
        is_token_F = column_F < end_P[row_F]
        token_F = (start_P[row_F] + column_F) * is_token_F
        return token_F if self.plan is None else self.plan.place_N[token_F], is_token_F

    def queries(self, x_1HUD: Tensor) -> list[Tensor]:
        """Return the queries of each rectangle, [R, H, S, D]."""
        shapes, query_place_F, _, _ = self.rectangles
        return _split(x_1HUD, query_place_F, [(rows, queries) for rows, queries, _ in shapes])

    def keys(self, x_1HUD: Tensor) -> list[Tensor]:
        """Return the keys or values of each rectangle, [R, H, T, D]."""
        shapes, _, key_place_F, _ = self.rectangles
        return _split(x_1HUD, key_place_F, [(rows, keys) for rows, _, keys in shapes])

    def from_rectangles(self, parts: list[Tensor]) -> Tensor:
        """Convert the outputs of all rectangles, [R, H, S, D] each, to the row, [1, U, H, D]."""
        x_FHD = torch.cat([x_RHSD.transpose(1, 2).flatten(0, 1) for x_RHSD in parts])
        return picked(x_FHD, self.rectangles.field_U)[None]


def _split(x_1HUD: Tensor, place_F: Tensor | None, shapes: list[tuple[int, int]]) -> list[Tensor]:
    x_FHD = picked(x_1HUD.squeeze(0).transpose(0, 1), place_F)
    parts = x_FHD.split([rows * width for rows, width in shapes])
    return [x.unflatten(0, shape).transpose(1, 2) for x, shape in zip(parts, shapes, strict=True)]


def picked(x_UHD: Tensor, index_N: Tensor | None) -> Tensor:
    """Return the entries at an index, [N, H, D]. Entries may occur several times. None: return all, unchanged."""
    if index_N is None:
        return x_UHD
    # The gradient of `embedding` sums the contributions to an entry several times as fast as that of index_select.
    return embedding(index_N, x_UHD.flatten(1)).unflatten(1, x_UHD.shape[1:])
