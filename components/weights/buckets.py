"""Buckets: many tensors in one flat buffer of bytes, with a table of what lies where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from components.process.heartbeat import beat

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


class BucketFiller(ABC):
    """Copies tensors into one bucket on a device, which is sent, and used again, each time that it is full."""

    def __init__(self, device: torch.device, bucket_bytes: int, to_host: bool) -> None:
        """
        Args:
            device: of the bucket.
            bucket_bytes: of it; a larger tensor makes it larger.
            to_host: who is given the tensors that have passed wants them on the host.
        """
        self._bucket_bytes = bucket_bytes
        self._leaves_device = to_host and device.type == "cuda"
        self._on_host = torch.empty(0, dtype=torch.uint8)
        self.bucket = torch.empty(0, dtype=torch.uint8, device=device)
        self.pieces: list[Piece] = []
        self.end = 0
        """Bytes of the bucket that are in use."""

    @abstractmethod
    def send(self) -> None:
        """Hand what is in the bucket over; it is filled again afterwards."""

    def passed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Send tensors. From a GPU to the host they come out once their bucket is sent, and last until the next one is
        asked for: a bucket leaves the device in one copy, into pinned memory, while it is sent.
        """
        for name, tensor in tensors:
            start = -(-self.end // ALIGNMENT) * ALIGNMENT
            if start + tensor.nbytes > len(self.bucket):
                yield from self._hand_over()
                start = 0
            if tensor.nbytes > len(self.bucket):
                size = max(self._bucket_bytes, tensor.nbytes)
                self.bucket = torch.empty(size, dtype=torch.uint8, device=self.bucket.device)
            self._put(name, tensor, start)
            if not self._leaves_device:
                yield name, tensor
        yield from self._hand_over()

    def _put(self, name: str, tensor: Tensor, start: int) -> None:
        piece = Piece(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)
        ((_, place),) = pieces_of(self.bucket, [piece])
        place.copy_(tensor)
        self.pieces.append(piece)
        self.end = start + tensor.nbytes

    def _hand_over(self) -> Iterator[tuple[str, Tensor]]:
        if not self.pieces:
            return
        if self._leaves_device:
            if len(self._on_host) < self.end:
                self._on_host = torch.empty(len(self.bucket), dtype=torch.uint8, pin_memory=True)
            self._on_host[: self.end].copy_(self.bucket[: self.end], non_blocking=True)
        self.send()
        if self._leaves_device:
            torch.cuda.current_stream(self.bucket.device).synchronize()
            yield from pieces_of(self._on_host, self.pieces)
        self.pieces, self.end = [], 0
