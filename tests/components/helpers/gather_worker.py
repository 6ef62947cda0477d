"""The work of a rank in test_gather.py."""

from __future__ import annotations

import resource
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from components.train.process_group import init_process_group
from components.weights.all_gather import EverywhereBucket
from components.weights.gather import Bucket, Part, gathered
from components.weights.parts import cut_part, part_of
from tests.components.helpers.written_bytes import WrittenBytes

BUCKET_BYTES = 80 * 2**20
LARGE, COUNT = 40 * 2**20, 6
"""Size in bytes and number of the large weights. The allocator keeps freed blocks below 32 MiB."""
CPU = torch.device("cpu")


def wholes() -> dict[str, Tensor]:
    """Numbers of rows: divisible by the number of ranks, not divisible, and smaller than the number of ranks."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"even": (8, 3), "uneven": (7, 5), "vector": (13,), "one row": (1, 6), "none": (0, 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def every_layout(bucket_bytes: int, everywhere: bool) -> dict[str, Tensor]:
    """Return weights sharded by rows, replicated, sharded by columns, and sharded over a two-dimensional mesh, as well
    as plain ones.
    """
    init_process_group()
    ranks = dist.get_world_size()
    line, grid = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (ranks // 2, 2))
    layouts = {
        "rows": (line, [Shard(0)]),
        "copies": (line, [Replicate()]),
        "rows and copies": (grid, [Shard(0), Replicate()]),
    }
    parts = []
    for name, whole in wholes().items():
        placed: dict[str, Tensor] = {layout: distribute_tensor(whole, *where) for layout, where in layouts.items()}
        if whole.ndim > 1:
            placed["columns"] = distribute_tensor(whole, line, [Shard(1)])
            placed["grid"] = distribute_tensor(whole, grid, [Shard(0), Shard(1)])
        placed["plain"] = whole
        for layout, tensor in placed.items():
            # The dtypes of master weights and of passes alternate.
            dtype = torch.bfloat16 if len(parts) % 2 else torch.float32
            parts.append((f"{name}, {layout}, {dtype}", tensor, dtype))
    bucket_type = EverywhereBucket if everywhere else Bucket
    lazily = ((name, part_of(tensor, dtype, CPU)) for name, tensor, dtype in parts)
    return {name: tensor.clone() for name, tensor in gathered(lazily, CPU, bucket_bytes, bucket_type)}


class Collectives(TorchDispatchMode):
    """Names of the collectives that this thread has started."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def divided_rows(bucket_bytes: int) -> tuple[dict[str, Tensor], list[str], dict[str, int]]:
    """Gather weights whose rows or elements are divided in order on every rank.

    Returns:
        The weights, the names of the collectives, and the number of bytes that each other operation has written.
    """
    init_process_group()
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    parts: list[tuple[str, Part]] = []
    for name, whole in wholes().items():
        parts.append((f"{name}, rows", part_of(distribute_tensor(whole, line, [Shard(0)]), whole.dtype, CPU)))
        # As ZeRO cuts parameters.
        most = ceil(whole.numel() / dist.get_world_size())
        start = dist.get_rank() * most
        shard = whole.flatten()[start : start + most]
        parts.append((f"{name}, elements", cut_part(shard, whole.shape, whole.dtype, most)))
    with WrittenBytes() as written, Collectives() as collectives:
        weights = dict(gathered(parts, CPU, bucket_bytes, EverywhereBucket))
    return {name: tensor.clone() for name, tensor in weights.items()}, collectives.names, written.by_operation


def grows_by() -> int:
    """Return the peak growth of this rank's memory in bytes while the large weights are gathered."""
    init_process_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = [distribute_tensor(torch.ones(LARGE // 256, 64), mesh, [Shard(0)]) for _ in range(COUNT)]
    most = 0
    # The first gather creates connections and threads.
    for _ in range(2):
        dist.barrier()
        before, most = resident_bytes(), 0
        parts = ((f"{i}", part_of(weight, torch.float32, CPU)) for i, weight in enumerate(weights))
        for _, tensor in gathered(parts, CPU, BUCKET_BYTES):
            assert float(tensor.sum()) == LARGE // 4
            most = max(most, resident_bytes() - before)
    return most


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
