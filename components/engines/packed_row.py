"""Sequences in one row, as attention is given them: each by itself, and whole.

Where there is no kernel for sequences of different lengths, those of about the same length stand as the rows of a
rectangle, so that there are few calls. A token attends to nothing after it, so what fills a row up changes nothing.

Legend: `N` tokens of the sequences end to end, `U` places of the row, `F` fields of all rectangles, `R` sequences of a
rectangle of length `T`, `H` heads, `D` size of a head.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from components.batch import Batch
from components.engines.context import Context


class Rectangles(NamedTuple):
    """How the row becomes rectangles, and these the row."""

    shapes: list[tuple[int, int]]
    """R and T of each."""
    place_F: Tensor | None
    """int64, of each field the place whose token stands there, any where none does; None: all stand in order."""
    field_U: Tensor | None
    """int64, of each place a field where its token stands."""


class PackedRow:
    """Where the sequences lie. An object of its own, so that nobody looks for tensors in it on its way to attention."""

    context: Context | None = None
    """Over whose ranks the row is spread; None: this rank has all of it."""

    def __init__(self, batch: Batch, place_N: Tensor | None = None, first_U: Tensor | None = None) -> None:
        """
        Args:
            batch: the sequences, none of them empty.
            place_N: of each token its place in the row; None: they lie end to end.
            first_U: of each place the first token that lies there.
        """
        self.lengths = batch.lengths
        self.place_N = place_N
        self.first_U = first_U
        self.places = batch.num_tokens if first_U is None else len(first_U)
        """U."""
        packed = batch.packed()
        self.borders, self.longest = packed.cumulative_lengths, packed.max_length

    @cached_property
    def rectangles(self) -> Rectangles:
        """Sequences by length, the longest first; a rectangle is filled up by a quarter at most, or 8 tokens."""
        length_B, order_B = self.lengths.cpu().sort(descending=True, stable=True)
        shapes: list[tuple[int, int]] = []
        for length in length_B.tolist():
            rows, width = shapes[-1] if shapes else (0, 0)
            if rows and width - length <= max(8, width // 4):
                shapes[-1] = rows + 1, width
            else:
                shapes.append((1, length))
        if self.place_N is None and len(shapes) == 1 and int(length_B[-1]) == int(length_B[0]):
            return Rectangles(shapes, None, None)
        width_B = torch.tensor([width for rows, width in shapes for _ in range(rows)])
        row_F = torch.arange(len(width_B)).repeat_interleave(width_B)
        column_F = torch.arange(len(row_F)) - (width_B.cumsum(0) - width_B)[row_F]
        start_B = (self.lengths.cumsum(0) - self.lengths).cpu()[order_B]
        is_token_F = column_F < length_B[row_F]
        token_F = (start_B[row_F] + column_F) * is_token_F
        place_F = token_F if self.place_N is None else self.place_N.cpu()[token_F]
        field_N = torch.empty(int(length_B.sum()), dtype=torch.int64)
        field_N[token_F[is_token_F]] = is_token_F.nonzero().squeeze(1)
        field_U = field_N if self.first_U is None else field_N[self.first_U.cpu()]
        device = self.lengths.device
        return Rectangles(shapes, place_F.to(device), field_U.to(device))

    def in_rectangles(self, x_1HUD: Tensor) -> list[Tensor]:
        """[R, H, T, D] of each rectangle."""
        shapes, place_F, _ = self.rectangles
        x_FHD = picked(x_1HUD[0].transpose(0, 1), place_F)
        parts = x_FHD.split([rows * width for rows, width in shapes])
        return [x.unflatten(0, shape).transpose(1, 2) for x, shape in zip(parts, shapes, strict=True)]

    def from_rectangles(self, parts: list[Tensor]) -> Tensor:
        """[1, U, H, D], of [R, H, T, D] of each rectangle."""
        x_FHD = torch.cat([x_RHTD.transpose(1, 2).flatten(0, 1) for x_RHTD in parts])
        return picked(x_FHD, self.rectangles.field_U)[None]


def picked(x_UHD: Tensor, index_N: Tensor | None) -> Tensor:
    """[N, H, D] the entries at an index, perhaps several times; None: as they are."""
    if index_N is None:
        return x_UHD
    # Its gradient sums what comes back to a place, several times as fast as that of index_select.
    return embedding(index_N, x_UHD.flatten(1)).unflatten(1, x_UHD.shape[1:])
