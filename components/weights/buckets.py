"""Buckets: many tensors in one flat buffer of bytes, with a table of their positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from components.process.heartbeat import beat

# Every tensor begins at a multiple of this number of bytes. Vector loads and views as another dtype fail or are slow at
# other offsets.
ALIGNMENT = 64


class Piece(NamedTuple):
    """Name, dtype, shape and position of one tensor in its bucket."""

    name: str
    dtype: str
    """Name of the torch dtype, such as "float32"."""
    shape: tuple[int, ...]
    offset: int
    """Offset from the start of the bucket, in bytes."""

    @classmethod
    def from_json(cls, listed: list[Any]) -> Piece:
        """Return the piece that JSON has stored as a list."""
        name, dtype, shape, offset = listed
        return cls(name, dtype, tuple(shape), offset)


def pieces_of(flat: Tensor, pieces: Sequence[Piece]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each tensor and a view of it in a flat buffer.

    Args:
        flat: [bytes] uint8, the content of a bucket.
        pieces: table of the bucket.
    """
    for name, dtype_name, shape, offset in pieces:
        dtype: torch.dtype = getattr(torch, dtype_name)
        nbytes = prod(shape) * dtype.itemsize
        yield name, flat[offset : offset + nbytes].view(dtype).view(shape)
        beat()
