"""Buckets: many tensors in one flat buffer of bytes, with a table of what lies where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from components.heartbeat import beat

# Every tensor begins at a multiple of it: vector loads, and a view as any dtype, want their own alignment.
_ALIGNMENT = 64


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


@dataclass
class Bucket:
    """Tensors that travel together, not yet in one buffer."""

    pieces: list[Piece] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    nbytes: int = 0
    """Size of the flat buffer, gaps of the alignment included."""

    def add(self, name: str, tensor: Tensor) -> None:
        offset = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.pieces.append(Piece(name, dtype, tuple(tensor.shape), offset))
        self.tensors.append(tensor)
        self.nbytes = offset + tensor.nbytes


def buckets(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Put `tensors` together up to `max_bytes`; a larger one stands alone.

    Raises:
        ValueError: a name comes twice.
    """
    bucket = Bucket()
    names: set[str] = set()
    for name, tensor in tensors:
        if name in names:
            raise ValueError(f"weight {name!r} came twice; names must be unique")
        names.add(name)
        if bucket.pieces and bucket.nbytes + tensor.nbytes > max_bytes:
            yield bucket
            beat()
            bucket = Bucket()
        bucket.add(name, tensor.detach())
    if bucket.pieces:
        yield bucket
        beat()


def pieces_of(flat: Tensor, pieces: Sequence[Piece]) -> Iterator[tuple[str, Tensor]]:
    """Names and views into a flat buffer of bytes."""
    for name, dtype_name, shape, offset in pieces:
        dtype: torch.dtype = getattr(torch, dtype_name)
        nbytes = prod(shape) * dtype.itemsize
        yield name, flat[offset : offset + nbytes].view(dtype).view(shape)
        beat()
