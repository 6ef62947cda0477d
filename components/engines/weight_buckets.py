"""Buckets: many tensors in one flat buffer of bytes, with a table of what lies where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from components.heartbeat import beat

# Every tensor begins at a multiple of it: vector loads, and a view as any dtype, want their own alignment.
ALIGNMENT = 64


class Piece(NamedTuple):
    """Where one tensor lies in its bucket."""

    name: str
    dtype: str
    """As torch names it: "float32"."""
    shape: tuple[int, ...]
    offset: int
    """From the start of the bucket, in bytes."""

    @classmethod
    def of(cls, listed: list[Any]) -> Piece:
        """What json has made a list of."""
        name, dtype, shape, offset = listed
        return cls(name, dtype, tuple(shape), offset)


def pieces_of(flat: Tensor, pieces: Sequence[Piece]) -> Iterator[tuple[str, Tensor]]:
    """Names and views into a flat buffer of bytes."""
    for name, dtype_name, shape, offset in pieces:
        dtype: torch.dtype = getattr(torch, dtype_name)
        nbytes = prod(shape) * dtype.itemsize
        yield name, flat[offset : offset + nbytes].view(dtype).view(shape)
        beat()
