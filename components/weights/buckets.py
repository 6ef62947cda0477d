"""Buckets: many tensors in one flat buffer of bytes, with a table of what lies where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
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
    def of(cls, listed: list[Any]) -> Piece:
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


class BucketFiller(ABC):
    """Copies tensors into one bucket on a device. A full bucket is sent and then filled again."""

    def __init__(self, device: torch.device, bucket_bytes: int, to_host: bool) -> None:
        """
        Args:
            device: device of the bucket.
            bucket_bytes: size of the bucket. A larger tensor enlarges it.
            to_host: yield the tensors that were sent on the host instead of on their device.
        """
        self._bucket_bytes = bucket_bytes
        self._leaves_device = to_host and device.type == "cuda"
        self._on_host = torch.empty(0, dtype=torch.uint8)
        self.bucket = torch.empty(0, dtype=torch.uint8, device=device)
        self.pieces: list[Piece] = []
        self.end = 0
        """Number of bytes of the bucket that are in use."""

    @abstractmethod
    def send(self) -> None:
        """Send the content of the bucket, which is overwritten afterwards."""

    def passed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Send tensors and yield them again.

        Tensors that go from a GPU to the host are yielded once their bucket has been sent, and are valid until the next
        tensor is requested. Each bucket is copied to pinned memory in one operation while it is sent.
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
        ((_, target),) = pieces_of(self.bucket, [piece])
        target.copy_(tensor)
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
        # The copy to pinned memory is asynchronous, and must have ended before its content is read.
        if self._leaves_device:
            torch.cuda.current_stream(self.bucket.device).synchronize()
            yield from pieces_of(self._on_host, self.pieces)
        self.pieces, self.end = [], 0
