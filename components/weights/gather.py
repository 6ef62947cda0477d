"""Gathering of sharded parameters on rank 0, one bucket at a time.

Each rank sends its shards of all parameters of a bucket to rank 0 in one message. The next bucket is received while
rank 0 processes the tensors of the current one, so rank 0 holds two buckets and one whole parameter at a time. On a
GPU, a bucket is copied to pinned host memory in one operation. all_gather.py gathers parameters on every rank instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, prod

import torch
import torch.distributed as dist
from torch import Tensor

from components.models.disk.blocks import Block
from components.process.heartbeat import beat

_ALIGNMENT = 64
"""Alignment of each part of a message in bytes, and minimum size of a message. No message is empty, because NCCL
requires all ranks in the first operation of a group."""


@dataclass(frozen=True)
class Part:
    """This rank's shard of one parameter."""

    numbers: Tensor
    """The shard, flattened, of any dtype and on any device."""
    shape: torch.Size
    """Shape of the whole parameter."""
    dtype: torch.dtype
    """Dtype in which the parameter is gathered."""
    blocks: list[Block]
    """Shard of each rank. It is empty if a lower rank has the same shard."""
    is_on_all: bool = False
    """True if every rank has the whole parameter."""

    @property
    def nbytes(self) -> int:
        """Size of the whole parameter in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_on_rank_0(self) -> bool:
        """True if rank 0 has the whole parameter."""
        return self.blocks[0].numbers == prod(self.shape)

    def count(self, rank: int) -> int:
        """Return the number of elements that a rank sends."""
        return self.blocks[rank].numbers


def gathered(
    parts: Iterable[tuple[str, Part]], device: torch.device, bucket_bytes: int, bucket_type: type[Bucket] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole parameters on the CPU of rank 0. Other ranks yield nothing but must exhaust the iterator too.

    Args:
        parts: name and part of each parameter, in the same order on all ranks.
        device: device from which messages are sent.
        bucket_bytes: maximum size of the whole parameters in a bucket. A larger parameter gets a bucket of its own.
        bucket_type: class that gathers the parameters of a bucket. Default: `Bucket`.

    Returns:
        Names and tensors. A tensor that already has the right device and dtype is not copied.
    """
    before: Iterator[tuple[str, Tensor]] = iter(())
    for items in _buckets(parts, bucket_bytes):
        # The messages of this bucket are in flight while the caller processes the bucket before it.
        bucket = (bucket_type or Bucket)(items, device).tensors()
        yield from before
        beat()
        before = bucket
    yield from before


def _buckets(parts: Iterable[tuple[str, Part]], bucket_bytes: int) -> Iterator[list[tuple[str, Part]]]:
    bucket: list[tuple[str, Part]] = []
    filled = 0
    for name, part in parts:
        if bucket and filled + part.nbytes > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, part))
        filled += part.nbytes
    if bucket:
        yield bucket


class Bucket:
    """Parameters that are being sent to rank 0."""

    def __init__(self, items: list[tuple[str, Part]], device: torch.device) -> None:
        """Start to gather parameters, given their names and parts, from a device."""
        self.items = items
        self.rank = dist.get_rank()
        self._on_cpu = device.type == "cpu"
        self.packed = [part for _, part in items if self.is_packed(part)]
        """Parameters whose shards are in the messages."""
        self.regions: list[Tensor] = []
        """[bytes] uint8 per rank: the message of each rank. A rank that receives nothing has only its own message."""
        self._works: list[dist.Work] = []
        self._arrived: torch.cuda.Event | None = None
        receives = self.rank == 0
        needs_messages = not all(part.is_on_rank_0 for part in self.packed)
        if not self.packed or not (receives or needs_messages):
            return
        sizes = [self.size_of(rank) for rank in (range(dist.get_world_size()) if receives else [self.rank])]
        # One allocation for the messages of all ranks, into whose regions they are received without another copy.
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self.regions = list(flat.split(sizes))
        self.pack(self.regions[0])
        if needs_messages:
            received = [dist.P2POp(dist.irecv, region, rank) for rank, region in enumerate(self.regions) if rank]
            self._works = dist.batch_isend_irecv(received or [dist.P2POp(dist.isend, self.regions[0], 0)])
        if receives and device.type == "cuda":
            self._leave_device(flat, sizes)

    def is_packed(self, part: Part) -> bool:
        """True if the shards must be sent to another rank or copied to another device."""
        return not (part.is_on_rank_0 and self._on_cpu)

    def size_of(self, rank: int) -> int:
        """Return the size of the message of a rank in bytes."""
        return max(_ALIGNMENT, sum(aligned(part.count(rank) * part.dtype.itemsize) for part in self.packed))

    def pack(self, region: Tensor) -> None:
        """Copy this rank's shards into its message."""
        offset = 0
        for part in self.packed:
            nbytes = part.count(self.rank) * part.dtype.itemsize
            region[offset : offset + nbytes].view(part.dtype).copy_(part.numbers[: part.count(self.rank)])
            offset += aligned(nbytes)

    def _leave_device(self, flat: Tensor, sizes: list[int]) -> None:
        """Queue the copy to the host after the messages. The host does not block."""
        for work in self._works:
            work.wait()
        self._works = []
        # Allocating per bucket is cheap: torch caches freed pinned memory and reuses it for a later bucket.
        on_host = torch.empty(len(flat), dtype=torch.uint8, pin_memory=True)
        on_host.copy_(flat, non_blocking=True)
        self.regions = list(on_host.split(sizes))
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Wait for the messages, and yield the whole parameters on the ranks that receive them."""
        for work in self._works:
            work.wait()
        if self._arrived is not None:
            # The copy to the host was only queued, so its memory must not be read before it has ended.
            self._arrived.synchronize()
        if self.rank:
            return
        offsets = [0] * len(self.regions)
        for name, part in self.items:
            if self.is_packed(part):
                yield name, self.joined(part, offsets)
            else:
                yield name, part.numbers.to(part.dtype).view(part.shape)

    def joined(self, part: Part, offsets: list[int]) -> Tensor:
        """Return the next parameter as a whole.

        Args:
            part: part of the parameter.
            offsets: byte offset of its shard in the message of each rank. They are advanced past it.
        """
        whole = torch.empty(prod(part.shape), dtype=part.dtype, device=self.regions[0].device)
        for rank, block in enumerate(part.blocks):
            nbytes = block.numbers * part.dtype.itemsize
            piece = self.regions[rank][offsets[rank] : offsets[rank] + nbytes].view(part.dtype)
            offsets[rank] += aligned(nbytes)
            if part.is_on_rank_0 and rank == 0:
                # The message of rank 0 is the whole parameter, and is used without a copy.
                whole = piece
            elif nbytes:
                block.view(whole.view(-1, block.width)).copy_(piece.view(block.rows, block.columns))
        return whole.view(part.shape)


def aligned(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole units of alignment."""
    return ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
