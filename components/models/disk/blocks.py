"""Which part of a parameter a rank has: some of its rows, and of each of them a stretch.

`fully_shard` gives the ranks of one axis rows. Where ranks of another axis share a layer, these are rows of what each
of them has: of its own rows, of its own columns, or of all.

Legend: `R` rows of a parameter, `W` numbers of a row, laid flat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True)
class Block:
    """A part of [R, W]."""

    row: int
    rows: int
    column: int = 0
    columns: int = 1
    width: int = 1
    """W."""
    is_first: bool = True
    """No rank before this one has the same part."""

    @property
    def numbers(self) -> int:
        """How many it has."""
        return self.rows * self.columns

    @property
    def is_stretch(self) -> bool:
        """Its numbers follow each other in the parameter."""
        return self.columns == self.width

    @property
    def by_numbers(self) -> Block:
        """The same of rows of one number, where it is a stretch."""
        if not self.is_stretch:
            return self
        return Block(self.row * self.width, self.rows * self.width, is_first=self.is_first)

    def of(self, whole_RW: Tensor) -> Tensor:
        """[rows, columns] as a view."""
        return whole_RW[self.row : self.row + self.rows, self.column : self.column + self.columns]

    def columns_of(self, rows: Tensor) -> Tensor:
        """[rows, columns] of so many whole rows; those as they are where it has all columns."""
        return rows if self.is_stretch else rows.flatten(1)[:, self.column : self.column + self.columns].contiguous()


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_block(tensor: Any) -> Block:
    """What `local_part` is of the whole."""
    if not isinstance(tensor, DTensor):
        columns = tensor.shape[1:].numel()
        return Block(0, tensor.shape[:1].numel(), 0, columns, columns)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return _block(tensor, list(coordinate))


def block_of_each(tensor: DTensor) -> dict[int, Block]:
    """The same of all ranks that have a part, by rank."""
    ranks = tensor.device_mesh.mesh
    return {int(ranks[tuple(place)]): _block(tensor, place) for place in torch.ones_like(ranks).nonzero().tolist()}


def is_in_blocks(tensor: Any) -> bool:
    """Whether the parts of a DTensor are blocks: `fully_shard` cut rows of what ranks of a second axis have."""
    if not tensor.ndim or tensor.device_mesh.ndim > 2:
        return False
    first, *others = tensor.placements
    if not others:
        return first == Shard(0)
    (second,), size = others, tensor.device_mesh.size(1)
    if second == Shard(0):
        return first == _StridedShard(0, split_factor=size) and not tensor.shape[0] % size
    return first == Shard(0) and (second == Replicate() or (second == Shard(1) and not tensor.shape[1] % size))


def _block(tensor: DTensor, coordinate: list[int]) -> Block:
    rows = tensor.shape[0]
    width = columns = tensor.shape[1:].numel()
    row, column, is_first = 0, 0, True
    if tensor.device_mesh.ndim > 1:
        size, place = tensor.device_mesh.size(1), coordinate[1]
        cut = tensor.placements[1]
        # What does not divide is not cut so.
        if cut == Shard(0):
            rows //= size
            row = place * rows
        elif cut == Shard(1):
            columns //= size
            column = place * columns
        else:
            is_first = place == 0
    # Cut as torch.chunk cuts: the last ranks may have none.
    each = math.ceil(rows / tensor.device_mesh.size(0))
    skipped = min(coordinate[0] * each, rows)
    return Block(row + skipped, min(each, rows - skipped), column, columns, width, is_first)
