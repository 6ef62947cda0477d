"""Partitioned parameters made whole on rank 0, a bucket at a time.

What a rank has of all parameters of a bucket goes to rank 0 in one message. While rank 0 does something with the
tensors of one bucket, those of the next are on their way, so that it holds two buckets of its own and one parameter. On
a GPU a bucket leaves the device in one copy, into pinned memory; or every rank gets it, and it stays there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from components.models.disk.blocks import Block, block_of_each, is_in_blocks
from components.process.heartbeat import beat

_ALIGNMENT = 64
"""Of each part in a message, in bytes. No message is shorter: NCCL wants all ranks in the first one of a group."""
_NOTHING = Block(0, 0)


@dataclass(frozen=True)
class Part:
    """What this rank has of one parameter."""

    numbers: Tensor
    """Flat, in any type and on any device."""
    shape: torch.Size
    """Of the whole parameter."""
    dtype: torch.dtype
    """In which it is gathered."""
    blocks: list[Block]
    """What each rank has of the parameter; nothing where a rank before it has the same."""
    is_on_all: bool = False
    """Every rank has all of it."""

    @property
    def nbytes(self) -> int:
        """Of the whole parameter."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_here(self) -> bool:
        """Rank 0 has all of it."""
        return self.blocks[0].numbers == prod(self.shape)

    def count(self, rank: int) -> int:
        """Numbers that a rank sends."""
        return self.blocks[rank].numbers


def whole_part(tensor: Tensor, dtype: torch.dtype) -> Part:
    """Of a parameter that every rank has whole."""
    blocks = [Block(0, tensor.numel()), *[_NOTHING] * (dist.get_world_size() - 1)]
    return Part(tensor.detach().reshape(-1), tensor.shape, dtype, blocks, is_on_all=True)


def cut_part(numbers: Tensor, shape: torch.Size, dtype: torch.dtype, most: int) -> Part:
    """Of a parameter that is cut into parts of `most` numbers, of which the last ranks may have fewer, or none.

    Args:
        numbers: this rank's, perhaps with padding at the end.
        shape: of the whole parameter.
        dtype: in which it is gathered.
        most: numbers of rank 0.
    """
    starts = [min(rank * most, prod(shape)) for rank in range(dist.get_world_size() + 1)]
    blocks = [Block(start, end - start) for start, end in pairwise(starts)]
    return Part(numbers.detach().reshape(-1), shape, dtype, blocks)


def part_of(parameter: Any, dtype: torch.dtype, device: torch.device) -> Part:
    """Of a plain tensor, or of a DTensor in any layout. All ranks call this: other layouts than blocks over all ranks
    are made whole here, one parameter at a time.
    """
    if not isinstance(parameter, DTensor):
        return whole_part(parameter, dtype)
    if parameter.device_mesh.size() == dist.get_world_size() and is_in_blocks(parameter):
        of_rank = block_of_each(parameter)
        blocks = [of_rank[rank] if of_rank[rank].is_first else _NOTHING for rank in range(len(of_rank))]
        numbers = parameter.to_local().detach().reshape(-1)
        is_on_all = all(block.numbers == parameter.numel() for block in of_rank.values())
        return Part(numbers, parameter.shape, dtype, blocks, is_on_all)
    made: Any = parameter.detach().to(device, dtype)
    return whole_part(made.full_tensor(), dtype)


def gathered(
    parts: Iterable[tuple[str, Part]], device: torch.device, bucket_bytes: int, everywhere: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters on rank 0's CPU; nothing on other ranks, which have to exhaust it as rank 0 does.

    Args:
        parts: of each parameter, in the same order on all ranks.
        device: that messages leave from.
        bucket_bytes: of whole parameters, what travels together; a larger one travels alone.
        everywhere: on every rank, where it has its parameters, and what came from others on `device`.

    Returns:
        Names and tensors. One that is where it has to be, in the right type, is not copied.
    """
    before: _Bucket | None = None
    for items in _buckets(parts, bucket_bytes):
        bucket = _Bucket(items, device, everywhere)
        if before is not None:
            yield from before.tensors()
            beat()
        before = bucket
    if before is not None:
        yield from before.tensors()
        beat()


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


class _Bucket:
    """Parameters on their way to rank 0, or to every rank."""

    def __init__(self, items: list[tuple[str, Part]], device: torch.device, everywhere: bool) -> None:
        self._items = items
        self._rank, ranks = dist.get_rank(), range(dist.get_world_size())
        self._on_cpu, self._everywhere = device.type == "cpu", everywhere
        self._receivers = ranks if everywhere else range(1)
        self._travelling = [part for _, part in items if self._travels(part)]
        self._regions: list[Tensor] = []
        """[bytes] uint8, what each rank sends; on ranks that receive nothing their own alone."""
        self._works: list[dist.Work] = []
        self._arrived: torch.cuda.Event | None = None
        receives = self._rank in self._receivers
        if not self._travelling or not (receives or self._needs_messages):
            return
        sizes = [self._size_of(rank) for rank in (ranks if receives else [self._rank])]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._regions = list(flat.split(sizes))
        own = self._regions[self._rank if receives else 0]
        self._pack(own)
        if self._needs_messages:
            others = [(rank, region) for rank, region in enumerate(self._regions) if receives and rank != self._rank]
            messages = [dist.P2POp(dist.irecv, region, rank) for rank, region in others]
            messages += [dist.P2POp(dist.isend, own, rank) for rank in self._receivers if rank != self._rank]
            self._works = dist.batch_isend_irecv(messages) if messages else []
        if receives and not everywhere and device.type == "cuda":
            self._leave_device(flat, sizes)

    def _travels(self, part: Part) -> bool:
        """Whether it needs a message, or is not on the right device."""
        return not part.is_on_all if self._everywhere else not (part.is_here and self._on_cpu)

    @property
    def _needs_messages(self) -> bool:
        return self._everywhere or not all(part.is_here for part in self._travelling)

    def _size_of(self, rank: int) -> int:
        return max(_ALIGNMENT, sum(_aligned(part.count(rank) * part.dtype.itemsize) for part in self._travelling))

    def _pack(self, region: Tensor) -> None:
        offset = 0
        for part in self._travelling:
            nbytes = part.count(self._rank) * part.dtype.itemsize
            region[offset : offset + nbytes].view(part.dtype).copy_(part.numbers[: part.count(self._rank)])
            offset += _aligned(nbytes)

    def _leave_device(self, flat: Tensor, sizes: list[int]) -> None:
        """Queued behind the messages; the host waits for neither."""
        for work in self._works:
            work.wait()
        self._works = []
        # torch keeps pinned memory that is freed, and gives it to a later bucket.
        on_host = torch.empty(len(flat), dtype=torch.uint8, pin_memory=True)
        on_host.copy_(flat, non_blocking=True)
        self._regions = list(on_host.split(sizes))
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Wait until all has come; the whole parameters, where they were to come."""
        for work in self._works:
            work.wait()
        if self._arrived is not None:
            self._arrived.synchronize()
        if self._rank not in self._receivers:
            return
        places = [0] * len(self._regions)
        for name, part in self._items:
            if self._travels(part):
                yield name, self._joined(part, places)
            else:
                yield name, part.numbers.to(part.dtype).view(part.shape)

    def _joined(self, part: Part, places: list[int]) -> Tensor:
        """The next parameter; `places` are where its parts begin in each region, and move on."""
        whole = torch.empty(prod(part.shape), dtype=part.dtype, device=self._regions[0].device)
        for rank, block in enumerate(part.blocks):
            nbytes = block.numbers * part.dtype.itemsize
            piece = self._regions[rank][places[rank] : places[rank] + nbytes].view(part.dtype)
            places[rank] += _aligned(nbytes)
            if part.is_here and rank == 0:
                whole = piece
            elif nbytes:
                block.of(whole.view(-1, block.width)).copy_(piece.view(block.rows, block.columns))
        return whole.view(part.shape)


def _aligned(nbytes: int) -> int:
    return ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
