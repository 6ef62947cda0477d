"""Shards of a parameter: plain tensors, DTensors, and flat shards as ZeRO cuts them."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from components.models.disk.blocks import Block, block_of_each
from components.weights.gather import Part


def cut_part(numbers: Tensor, shape: torch.Size, dtype: torch.dtype, most: int) -> Part:
    """Return the part of a parameter that is cut into flat shards of `most` elements. The last ranks may have fewer
    elements, or none.

    Args:
        numbers: this rank's shard, possibly with padding at the end.
        shape: shape of the whole parameter.
        dtype: dtype in which the parameter is gathered.
        most: number of elements of rank 0.
    """
    starts = [min(rank * most, prod(shape)) for rank in range(dist.get_world_size() + 1)]
    blocks = [Block(start, end - start) for start, end in pairwise(starts)]
    return Part(numbers.detach().reshape(-1), shape, dtype, blocks)


def part_of(parameter: Any, dtype: torch.dtype, device: torch.device) -> Part:
    """Return the part of a plain tensor, or of a DTensor in any layout.

    All ranks must call this. DTensors whose shards are not blocks over all ranks are gathered here, one parameter at a
    time.
    """
    if not isinstance(parameter, DTensor):
        return unsharded_part(parameter, dtype)
    if parameter.device_mesh.size() == dist.get_world_size() and is_in_blocks(parameter):
        of_rank = block_of_each(parameter)
        # A rank with a copy of another rank's block sends nothing, so that no element is sent twice.
        blocks = [of_rank[rank] if of_rank[rank].is_first else _NOTHING for rank in range(len(of_rank))]
        numbers = parameter.to_local().detach().reshape(-1)
        is_on_all = all(block.numbers == parameter.numel() for block in of_rank.values())
        return Part(numbers, parameter.shape, dtype, blocks, is_on_all)
    made: Any = parameter.detach().to(device, dtype)
    return unsharded_part(made.full_tensor(), dtype)


_NOTHING = Block(0, 0)


def unsharded_part(tensor: Tensor, dtype: torch.dtype) -> Part:
    """Return the part of a parameter that every rank has whole."""
    blocks = [Block(0, tensor.numel()), *[_NOTHING] * (dist.get_world_size() - 1)]
    return Part(tensor.detach().reshape(-1), tensor.shape, dtype, blocks, is_on_all=True)


def is_in_blocks(tensor: Any) -> bool:
    """True if the shards of a DTensor are blocks: `fully_shard` has divided the rows of the parts on a second axis."""
    if not tensor.ndim or tensor.device_mesh.ndim > 2:
        return False
    first, *others = tensor.placements
    if not others:
        return first == Shard(0)
    (second,), size = others, tensor.device_mesh.size(1)
    # Both axes divide the rows. The shards are blocks only if the second axis divides the rows evenly.
    if second == Shard(0):
        return first == _StridedShard(0, split_factor=size) and not tensor.shape[0] % size
    return first == Shard(0) and (second == Replicate() or (second == Shard(1) and not tensor.shape[1] % size))
