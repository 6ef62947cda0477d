"""Filling of the two buckets of a carrier that sends weights.

A weight that is larger than a bucket is cut. Each slice is sent in a bucket of its own, and the reader joins them.
Device memory for sending is therefore two buckets, whatever the size of the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from components.process.heartbeat import beat
from components.weights.buckets import ALIGNMENT, Piece, pieces_of
from components.weights.verification import TensorDigests

WHOLE = -1
"""First element of a bucket that contains whole tensors."""


class BucketFiller(ABC):
    """Copies tensors into two buckets on a device in turn. One is filled while the other one is sent."""

    def __init__(
        self,
        device: torch.device,
        bucket_bytes: int,
        to_host: bool,
        dtype: torch.dtype | None = None,
        digests: TensorDigests | None = None,
    ) -> None:
        """
        Args:
            device: device of the buckets.
            bucket_bytes: size of a bucket. A larger tensor is cut into slices.
            to_host: yield the tensors that were sent on the host instead of on their device.
            dtype: dtype of the tensors in the buckets. None: the dtype of each tensor.
            digests: gets the digest of each tensor in the buckets. None: none are computed.
        """
        self._bucket_bytes = bucket_bytes
        self._leaves_device = to_host and device.type == "cuda"
        self._dtype = dtype
        self._digests = digests
        self._on_host = torch.empty(0, dtype=torch.uint8)
        self._sources: list[Tensor] = []
        self._buckets = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self.device = device
        self.start = WHOLE
        """Index of the first element of the slice in the bucket, if it contains a slice of a tensor in `pieces`, else
        `WHOLE`.
        """
        self.slot = 0
        """Index of the bucket that is filled next."""
        self.pieces: list[Piece] = []
        self.end = 0
        """Number of bytes of the bucket that are in use."""

    @property
    def bucket(self) -> Tensor:
        """The bucket that is filled or sent, [bytes] uint8."""
        return self._buckets[self.slot]

    @abstractmethod
    def send(self) -> None:
        """Start to send the content of the bucket, which is complete. Its memory is not written to until `reclaim`."""

    @abstractmethod
    def reclaim(self) -> None:
        """Wait until no reader needs the content of the bucket, if it was sent before."""

    def _new_bucket(self) -> Tensor:
        return torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self.device)

    def passed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Send tensors and yield them again.

        Up to one bucket of tensors is requested before they are copied. Tensors that go from a GPU to the host are
        yielded once their bucket is being sent, in the dtype of the bucket, and are valid until the next tensor is
        requested. When the iterator is exhausted, all buckets are being sent; see `reclaim_all`.
        """
        for name, tensor in tensors:
            dtype = self._dtype or tensor.dtype
            nbytes = tensor.numel() * dtype.itemsize
            start = -(-self.end // ALIGNMENT) * ALIGNMENT
            if self.pieces and start + nbytes > self._bucket_bytes:
                yield from self._hand_over()
                start = 0
            if nbytes > self._bucket_bytes:
                yield name, self._send_slices(name, tensor.detach(), dtype)
                continue
            self.pieces.append(Piece(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), start))
            self._sources.append(tensor.detach())
            self.end = start + nbytes
            if not self._leaves_device:
                yield name, tensor
        yield from self._hand_over()

    def _send_slices(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Send a tensor that is larger than a bucket. Return it, on the host if the tensors leave the device."""
        most = self._bucket_bytes // dtype.itemsize
        self.pieces = [Piece(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), 0)]
        for first, part in enumerate(tensor.reshape(-1).split(most)):
            self.start = first * most
            self._sources = [part]
            self.end = part.numel() * dtype.itemsize
            self.reclaim()
            self._fill()
            self.send()
            self.slot = 1 - self.slot
            beat()
        self.pieces, self.start, self.end = [], WHOLE, 0
        if self._digests is not None:
            self._digests.add(name, tensor.to(dtype))
        return tensor.to("cpu", dtype) if self._leaves_device else tensor

    def reclaim_all(self) -> None:
        """Wait until no reader needs a bucket."""
        for _ in self._buckets:
            self.reclaim()
            self.slot = 1 - self.slot

    def _hand_over(self) -> Iterator[tuple[str, Tensor]]:
        if not self.pieces:
            return
        self.reclaim()
        self._fill()
        self.send()
        # These begin after `send`, so that the readers do not wait for them.
        self._add_digests()
        if self._leaves_device:
            yield from pieces_of(self._host_copy(), self.pieces)
        self.pieces, self.end = [], 0
        self.slot = 1 - self.slot

    def _fill(self) -> None:
        """Copy the tensors into the bucket, and convert them in the same operation. Return when it is complete."""
        if not len(self.bucket):
            self._buckets[self.slot] = self._new_bucket()
        if self.start == WHOLE:
            targets = [target for _, target in pieces_of(self.bucket, self.pieces)]
        else:
            targets = [self.bucket[: self.end].view(getattr(torch, self.pieces[0].dtype))]
        # On a GPU one kernel copies many tensors, but only if all of them have the same dtypes.
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in zip(targets, self._sources, strict=True):
            to, of = groups.setdefault((target.dtype, source.dtype), ([], []))
            to.append(target)
            of.append(source)
        operations: Any = torch  # the stubs do not list it
        for to, of in groups.values():
            operations._foreach_copy_(to, of)
        self._sources = []
        finish_copies(self.device)

    def _add_digests(self) -> None:
        if self._digests is not None:
            for name, tensor in pieces_of(self.bucket, self.pieces):
                self._digests.add(name, tensor)

    def _host_copy(self) -> Tensor:
        if len(self._on_host) < self.end:
            self._on_host = torch.empty(len(self.bucket), dtype=torch.uint8, pin_memory=True)
        self._on_host[: self.end].copy_(self.bucket[: self.end], non_blocking=True)
        finish_copies(self.device)
        return self._on_host


def finish_copies(device: torch.device) -> None:
    """Wait until the operations that this thread has queued on a GPU have ended.

    Other processes must not read or overwrite a bucket before. Other streams of the device are not waited for.
    """
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


class SliceJoiner:
    """Joins the slices of tensors that are larger than a bucket, on the reader's side."""

    def __init__(self) -> None:
        self._whole = torch.empty(0)

    def joined(self, flat: Tensor, pieces: Sequence[Piece], start: int) -> Iterator[tuple[str, Tensor]]:
        """Copy a slice out of a bucket. Yield the tensor if this was its last slice.

        Args:
            flat: [bytes] uint8, the content of the bucket.
            pieces: the tensor.
            start: index of the first element of the slice.
        """
        ((name, dtype_name, shape, _),) = pieces
        part = flat.view(getattr(torch, dtype_name))
        if start == 0:
            self._whole = torch.empty(prod(shape), dtype=part.dtype, device=flat.device)
        self._whole[start : start + len(part)].copy_(part)
        if start + len(part) == len(self._whole):
            yield name, self._whole.view(shape)
            self._whole = torch.empty(0)
