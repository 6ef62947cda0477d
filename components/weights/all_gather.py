"""Gathering of sharded parameters on every rank, one bucket at a time and without the host.

The shards of a bucket are gathered by one coalesced `all_gather_into_tensor` over one allocation. A parameter whose
rows are divided over the ranks in order arrives as a whole there, and is not copied again. If the ranks have different
numbers of rows, the shorter shards are padded. Shards of other layouts, such as columns, are sent in one message per
rank, and joined from these.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from components.weights.gather import Bucket, Part, aligned


class EverywhereBucket(Bucket):
    """Parameters that are being gathered on every rank, on its device.

    A parameter that every rank has whole stays on its device, and is not copied if it already has the right dtype.
    """

    def __init__(self, items: list[tuple[str, Part]], device: torch.device) -> None:
        self.items = items
        self.rank = dist.get_rank()
        ranks = dist.get_world_size()
        in_order = [part for _, part in items if not part.is_on_all and is_in_order(part)]
        self.packed = [part for _, part in items if self.is_packed(part)]
        shards = [_padded(part, self.rank, device) for part in in_order]
        if self.packed:
            # A collective needs messages of the same size.
            shards.append(torch.zeros(max(map(self.size_of, range(ranks))), dtype=torch.uint8, device=device))
            self.pack(shards[-1])
        messages = [shard.view(torch.uint8) for shard in shards]
        results = _split([ranks * len(message) for message in messages], device)
        self._wholes = [result.view(part.dtype) for result, part in zip(results, in_order, strict=False)]
        self.regions = list(results[-1].split(len(messages[-1]))) if self.packed else []
        self._messages = messages
        """Tensors that the collective reads. They are kept until it has ended."""
        self._gathering: dist.Work | None = None
        if any(len(message) for message in messages):
            group: Any = dist.group.WORLD  # the stubs do not list the method
            self._gathering = group.allgather_into_tensor_coalesced(results, messages)

    def is_packed(self, part: Part) -> bool:
        return not (part.is_on_all or is_in_order(part))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Wait for the collective, and yield the whole parameters on every rank."""
        if self._gathering is not None:
            self._gathering.wait()
        self._messages = []
        wholes = iter(self._wholes)
        offsets = [0] * len(self.regions)
        for name, part in self.items:
            if part.is_on_all:
                yield name, part.numbers.to(part.dtype).view(part.shape)
            elif self.is_packed(part):
                yield name, self.joined(part, offsets)
            else:
                yield name, next(wholes)[: prod(part.shape)].view(part.shape)


def _split(sizes: list[int], device: torch.device) -> list[Tensor]:
    """Allocate tensors of these sizes, [bytes] uint8, in one block of memory."""
    flat = torch.empty(sum(map(aligned, sizes)), dtype=torch.uint8, device=device)
    regions = flat.split([aligned(size) for size in sizes])
    return [region[:size] for region, size in zip(regions, sizes, strict=True)]


def is_in_order(part: Part) -> bool:
    """True if the shards of the ranks, one after another, are the parameter, and only the last ones are shorter."""
    length = part.count(0)
    for rank, block in enumerate(part.blocks):
        start = block.row * block.width
        if block.numbers and not (block.is_stretch and start == rank * length and block.numbers <= length):
            return False
    return sum(block.numbers for block in part.blocks) == prod(part.shape)


def _padded(part: Part, rank: int, device: torch.device) -> Tensor:
    """Return this rank's shard, padded to the length of the first one. It is copied only if it is shorter, or has
    another dtype.
    """
    count = part.count(rank)
    shard = part.numbers[:count].to(device, part.dtype)
    if count < part.count(0):
        shard = torch.nn.functional.pad(shard, (0, part.count(0) - count))
    return shard
