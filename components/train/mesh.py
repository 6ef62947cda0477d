"""Axes of the ranks of a training engine, which determine the sequences and the part of the model of each rank.

By default every rank has sequences of its own (data parallelism). `parallel.context`, `.tensor` and `.expert` load a
plug-in (kind `parallelism`), whose ranks share sequences, layers or experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from components.batch import Batch
from components.registry import load
from components.train.config import AXES, TrainConfig


class Axes:
    """Data parallelism: a single axis of ranks, each with sequences of its own."""

    data: int
    """Data-parallel degree: number of ranks, or groups of ranks, with sequences of their own."""
    data_rank: int
    """Index of this rank, or of its group, on the data-parallel axis."""
    shards: DeviceMesh
    """Ranks over which parameters are sharded by rows."""
    copies: DeviceMesh | None = None
    """Ranks that have the same experts, over which these are sharded. None: all ranks have all experts."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:  # noqa: ARG002 - of plug-ins
        """
        Args:
            config: configuration of the engine, the same on all ranks.
            device: device of its collectives.
        """
        self.data = dist.get_world_size()
        self.data_rank = dist.get_rank()
        self.shards = all_ranks(device)

    def share(self, model: nn.Module) -> None:
        """Change `model` in place so that the ranks that share sequences or layers compute it together.

        Raises:
            ValueError: the model cannot be shared over these ranks.
        """

    def share_experts(self, model: nn.Module) -> list[nn.Module]:  # noqa: ARG002 - of plug-ins
        """Reduce the experts of all layers to this rank's share, in place. Return the modules that contain experts.

        Raises:
            ValueError: the model has no experts, or the number of ranks does not divide them.
        """
        return []

    def gather_batch(self, batch: Batch) -> tuple[Batch, slice]:
        """Return the sequences of all ranks that compute together, and the slice of `batch` among their tokens."""
        return batch, slice(None)

    def summed(self, values: Tensor) -> Tensor:
        """Sum `values` in place over the data-parallel axis, and return them."""
        dist.all_reduce(values)
        return values


def open_axes(config: TrainConfig, device: torch.device) -> Axes:
    """Return the axes of a configuration.

    Raises:
        ValueError: no plug-in provides an axis, or the parallel degrees do not fit the number of ranks.
    """
    kind = next((load("parallelism", axis, "parallel") for axis in AXES if getattr(config, axis) > 1), Axes)
    return kind(config, device)


def all_ranks(device: torch.device) -> DeviceMesh:
    """Return the mesh of one axis that holds all ranks."""
    assert dist.group.WORLD is not None
    return DeviceMesh.from_group(dist.group.WORLD, device.type)
