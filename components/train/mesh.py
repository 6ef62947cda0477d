"""The axes on which the ranks of an engine lie: which sequences, and which part of the model, a rank computes.

By default every rank has sequences of its own. `parallel.context`, `.tensor` and `.expert` load a plug-in (kind
`parallelism`), whose ranks share sequences, layers or experts.
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
    """One axis of ranks, each with sequences of its own."""

    data: int
    """Number of ranks, or groups of ranks, with sequences of their own."""
    data_rank: int
    """Number of this one among them."""
    shards: DeviceMesh
    """The ranks over which parameters are partitioned by rows."""
    copies: DeviceMesh | None = None
    """The ranks that have the same experts, which they partition; None: all ranks have all."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:  # noqa: ARG002 - of plug-ins
        """
        Args:
            config: of the engine; all ranks have the same.
            device: of its collectives.
        """
        self.data = dist.get_world_size()
        self.data_rank = dist.get_rank()
        self.shards = all_ranks(device)

    def share(self, model: nn.Module) -> None:
        """Let the ranks that share sequences or layers compute `model` together, in place.

        Raises:
            ValueError: it cannot be shared so.
        """

    def share_experts(self, model: nn.Module) -> list[nn.Module]:  # noqa: ARG002 - of plug-ins
        """Keep this rank's share of the experts of all layers, in place, and return the modules that have them.

        Raises:
            ValueError: the model has no experts, or they cannot be shared out.
        """
        return []

    def gather_batch(self, batch: Batch) -> tuple[Batch, slice]:
        """Return the sequences of all ranks that compute together, and the slice of their tokens that `batch` is."""
        return batch, slice(None)

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks with sequences of their own, in place."""
        dist.all_reduce(values)
        return values


def open_axes(config: TrainConfig, device: torch.device) -> Axes:
    """Return the axes that a configuration names.

    Raises:
        ValueError: no plug-in provides an axis, or the ranks cannot be shared out.
    """
    kind = next((load("parallelism", axis, "parallel") for axis in AXES if getattr(config, axis) > 1), Axes)
    return kind(config, device)


def all_ranks(device: torch.device) -> DeviceMesh:
    """Return the mesh of one axis that holds all ranks."""
    assert dist.group.WORLD is not None
    return DeviceMesh.from_group(dist.group.WORLD, device.type)
