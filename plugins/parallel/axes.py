"""Device meshes of context, tensor and expert parallelism.

Ranks that share sequences have consecutive numbers. They communicate most, and this places them on one machine.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from components.batch import Batch
from components.train.config import TrainConfig
from components.train.mesh import Axes
from plugins.parallel.context import slice_rows
from plugins.parallel.experts import share_experts
from plugins.parallel.tensor import cut_layers


class ParallelAxes(Axes):
    """The mesh data x context x tensor, and a second mesh copies x expert over the same ranks."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        """
        Args:
            config: configuration of the engine, equal on all ranks.
            device: device of the collectives.

        Raises:
            ValueError: the axes do not divide the number of ranks.
        """
        super().__init__(config, device)
        self.data = config.data_ranks(dist.get_world_size())
        alike = dist.get_world_size() // self.data
        self.data_rank = dist.get_rank() // alike
        self._mesh: DeviceMesh | None = None
        """data x context x tensor, or None if all ranks are on the data axis."""
        self._alike: dist.ProcessGroup | None = None
        """Ranks with the same sequences: context x tensor."""
        if alike > 1:
            shape = self.data, config.context, config.tensor
            self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context", "tensor"))
            self.shards = self._mesh["data", "context"]._flatten("shards")
            self._alike = self._mesh["context", "tensor"]._flatten("alike").get_group()
        self._experts: DeviceMesh | None = None
        """A second mesh over the same ranks. Ranks along `expert` hold different experts, along `copies` the same."""
        self.copies = None
        if config.expert > 1:
            self._experts = _expert_mesh(config.expert, device)
            self.copies = self._experts["copies"]

    def share(self, model: nn.Module) -> None:
        """Apply context and tensor parallelism to `model`. See `Axes.share`."""
        if self._mesh is None:
            return
        tensor = self._mesh["tensor"]
        if tensor.size() > 1:
            cut_layers(model, tensor)
        if self._mesh["context"].size() > 1:
            slice_rows(model, self._mesh.get_group("context"), tensor.size())

    def share_experts(self, model: nn.Module) -> list[nn.Module]:
        """Keep this rank's share of the experts; see `Axes.share_experts`."""
        if self._experts is None:
            return []
        return share_experts(model, self._experts["expert"])

    def gather_batch(self, batch: Batch) -> tuple[Batch, slice]:
        """Return the sequences of all ranks of the context and tensor axes, and the tokens of `batch` as a slice."""
        if self._alike is None:
            return batch, slice(None)
        parts: list[Batch] = [batch] * self._alike.size()
        dist.all_gather_object(parts, batch, group=self._alike)
        before = sum(part.num_tokens for part in parts[: self._alike.rank()])
        return Batch.concat(parts), slice(before, before + batch.num_tokens)

    def summed(self, values: Tensor) -> Tensor:
        """Sum over the data axis in place, and return the result. Values are equal along the other axes."""
        # Without a mesh all ranks are on the data axis, so the default group is used.
        group: dist.ProcessGroup | None = None
        if self._mesh is not None:
            group = self._mesh.get_group("data")
        dist.all_reduce(values, group=group)
        return values


def _expert_mesh(size: int, device: torch.device) -> DeviceMesh:
    shape = dist.get_world_size() // size, size
    return init_device_mesh(device.type, shape, mesh_dim_names=("copies", "expert"))
