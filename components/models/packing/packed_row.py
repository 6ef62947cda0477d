"""Sequences in one row, as attention is given them: each by itself.

Every token is a query once: where sequences share tokens, first these by themselves, and then the rest of each
sequence, which sees the sequence whole. Where there is no kernel for sequences of different lengths, those of about the
same length stand as the rows of a rectangle, so that there are few calls. A token attends to nothing after it, so what
fills a row up changes nothing.

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
from components.models.packing.layout import Part, RowPlan
from components.models.packing.row_slices import WHOLE_ROWS, RowSlices


class Rectangles(NamedTuple):
    """Indices that turn the row into rectangles, and these into the row."""

    shapes: list[tuple[int, int, int]]
    """R, S and T of each."""
    query_place_F: Tensor | None
    """int64, of each field of the queries the place whose token stands there, any where none does; None: all stand in
    order, and keys too."""
    key_place_F: Tensor | None
    """int64, as above."""
    field_U: Tensor | None
    """int64, of each place the field of the queries where its token stands."""


class PackedRow:
    """The places of sequences in a row. It is an object, so that no library looks for tensors in it."""

    slices: RowSlices = WHOLE_ROWS
    """The part of the row that each rank computes."""

    def __init__(self, batch: Batch, plan: RowPlan | None = None) -> None:
        """
        Args:
            batch: the sequences, none of them empty.
            plan: places that several tokens share; None: the sequences lie end to end.
        """
        self.lengths = batch.lengths
        self.plan = plan
        self.place_N = None if plan is None else plan.place_N
        """int64, of each token its place in the row; None: in order."""
        self.first_U = None if plan is None else plan.first_U
        """int64, of each place the first token that lies there; None: in order."""
        self.places = batch.num_tokens if self.first_U is None else len(self.first_U)
        """U."""
        packed = batch.packed()
        self.borders, self.longest = packed.cumulative_lengths, packed.max_length

    def parts(self) -> Iterable[Part]:
        """Return the parts of the queries. Every place of the row is in at least one."""
        if self.plan is not None:
            return self.plan.parts
        return [Part(sequence, 0, length) for sequence, length in enumerate(self.lengths.tolist())]

    @cached_property
    def rectangles(self) -> Rectangles:
        """Parts that begin at the same position by length, the longest first; a rectangle is filled up by a quarter at
        most, or 8 tokens.
        """
        parts = sorted(self.parts(), key=lambda part: (part.first, part.end), reverse=True)
        shapes: list[tuple[int, int, int]] = []
        first, width = -1, 0
        for part in parts:
            if part.first == first and width - part.end <= max(8, (width - first) // 4):
                shapes[-1] = (shapes[-1][0] + 1, *shapes[-1][1:])
            else:
                first, width = part.first, part.end
                shapes.append((1, width - first, width))
        in_order = [part.sequence for part in parts] == list(range(len(parts)))
        if in_order and len(shapes) == 1 and parts[0].end == parts[-1].end:
            return Rectangles(shapes, None, None, None)
        sequence_P, first_P, end_P = torch.tensor(parts).unbind(1)
        width_P = torch.tensor([keys for rows, _, keys in shapes for _ in range(rows)])
        start_P = (self.lengths.cumsum(0) - self.lengths).cpu()[sequence_P]
        query_place_F, is_token_F = self._fields(start_P, first_P, end_P, width_P)
        field_U = torch.empty(self.places, dtype=torch.int64)
        field_U[query_place_F[is_token_F]] = is_token_F.nonzero().squeeze(1)
        key_place_F = query_place_F
        if self.plan is not None:
            key_place_F, _ = self._fields(start_P, torch.zeros_like(first_P), end_P, width_P)
        device = self.lengths.device
        return Rectangles(shapes, query_place_F.to(device), key_place_F.to(device), field_U.to(device))

    def _fields(self, start_P: Tensor, first_P: Tensor, end_P: Tensor, width_P: Tensor) -> tuple[Tensor, Tensor]:
        """Rows from `first_P` up to `width_P`: [F] int64 their places, and [F] bool where a token stands."""
        count_P = width_P - first_P
        row_F = torch.arange(len(count_P)).repeat_interleave(count_P)
        column_F = torch.arange(len(row_F)) - (count_P.cumsum(0) - count_P - first_P)[row_F]
        is_token_F = column_F < end_P[row_F]
        token_F = (start_P[row_F] + column_F) * is_token_F
        return token_F if self.place_N is None else self.place_N.cpu()[token_F], is_token_F

    def queries(self, x_1HUD: Tensor) -> list[Tensor]:
        """[R, H, S, D] of each rectangle."""
        shapes, query_place_F, _, _ = self.rectangles
        return _split(x_1HUD, query_place_F, [(rows, queries) for rows, queries, _ in shapes])

    def keys(self, x_1HUD: Tensor) -> list[Tensor]:
        """[R, H, T, D] of each rectangle; also of values."""
        shapes, _, key_place_F, _ = self.rectangles
        return _split(x_1HUD, key_place_F, [(rows, keys) for rows, _, keys in shapes])

    def from_rectangles(self, parts: list[Tensor]) -> Tensor:
        """[1, U, H, D], of [R, H, S, D] of each rectangle."""
        x_FHD = torch.cat([x_RHSD.transpose(1, 2).flatten(0, 1) for x_RHSD in parts])
        return picked(x_FHD, self.rectangles.field_U)[None]


def _split(x_1HUD: Tensor, place_F: Tensor | None, shapes: list[tuple[int, int]]) -> list[Tensor]:
    x_FHD = picked(x_1HUD[0].transpose(0, 1), place_F)
    parts = x_FHD.split([rows * width for rows, width in shapes])
    return [x.unflatten(0, shape).transpose(1, 2) for x, shape in zip(parts, shapes, strict=True)]


def picked(x_UHD: Tensor, index_N: Tensor | None) -> Tensor:
    """[N, H, D] the entries at an index, perhaps several times; None: as they are."""
    if index_N is None:
        return x_UHD
    # Its gradient sums what comes back to a place, several times as fast as that of index_select.
    return embedding(index_N, x_UHD.flatten(1)).unflatten(1, x_UHD.shape[1:])
