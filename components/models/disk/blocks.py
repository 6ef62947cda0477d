"""Shard of a parameter on a rank: a range of rows, and within each row a range of columns.

`fully_shard` divides the rows over the ranks of one axis. If the ranks of another axis share a layer, it divides the
rows of the part that each of them has: some of the rows, some of the columns, or the whole.

Legend: `R` rows of a parameter, `W` elements of a row, flattened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Block:
    """A block of a parameter of shape [R, W]."""

    row: int
    rows: int
    column: int = 0
    columns: int = 1
    width: int = 1
    """W: number of elements of a complete row."""
    is_first: bool = True
    """True if no lower rank has the same block."""

    @property
    def numbers(self) -> int:
        """Number of elements of the block."""
        return self.rows * self.columns

    @property
    def is_stretch(self) -> bool:
        """True if the elements of the block are contiguous in the parameter."""
        return self.columns == self.width

    @property
    def by_numbers(self) -> Block:
        """The same block with rows of one element, if it is contiguous in memory."""
        if not self.is_stretch:
            return self
        return Block(self.row * self.width, self.rows * self.width, is_first=self.is_first)

    def view(self, whole_RW: Tensor) -> Tensor:
        """Return the block of a whole parameter, as a view of shape [rows, columns]."""
        return whole_RW[self.row : self.row + self.rows, self.column : self.column + self.columns]

    def columns_of(self, rows: Tensor) -> Tensor:
        """Return the columns of the block from whole rows, [rows, columns]. Rows are returned unchanged if the block
        has all columns.
        """
        # Without a copy, because most shards have all columns.
        if self.is_stretch:
            return rows
        return rows.flatten(1)[:, self.column : self.column + self.columns].contiguous()


def local_part(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor. Any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_block(tensor: Any) -> Block:
    """Return the block of the whole tensor that `local_part` returns."""
    if not isinstance(tensor, DTensor):
        columns = tensor.shape[1:].numel()
        return Block(0, tensor.shape[:1].numel(), 0, columns, columns)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return _block(tensor, list(coordinate))


def block_of_each(tensor: DTensor) -> dict[int, Block]:
    """Return the block of each rank that has a shard, by rank."""
    ranks = tensor.device_mesh.mesh
    return {int(ranks[tuple(place)]): _block(tensor, place) for place in torch.ones_like(ranks).nonzero().tolist()}


def _block(tensor: DTensor, coordinate: list[int]) -> Block:
    rows = tensor.shape[0]
    width = columns = tensor.shape[1:].numel()
    row, column, is_first = 0, 0, True
    if tensor.device_mesh.ndim > 1:
        size, place = tensor.device_mesh.size(1), coordinate[1]
        cut = tensor.placements[1]
        # A size that the number of ranks does not divide is never divided on this axis.
        if cut == Shard(0):
            rows //= size
            row = place * rows
        elif cut == Shard(1):
            columns //= size
            column = place * columns
        else:
            # The ranks of the second axis have copies of the same rows.
            is_first = place == 0
    # The rows are divided as by torch.chunk, so the last ranks may have fewer rows or none.
    each = math.ceil(rows / tensor.device_mesh.size(0))
    skipped = min(coordinate[0] * each, rows)
    return Block(row + skipped, min(each, rows - skipped), column, columns, width, is_first)
