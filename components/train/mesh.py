"""Where a rank stands: which sequences, and which tokens of them, are its own.

Ranks that share sequences have numbers that follow each other, so that those who talk most are on one machine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from components.batch import Batch
from components.models.packing.packed_model import packs, use_own_attention
from components.train.config import TrainConfig
from plugins.parallel.context import Context, mark_context
from plugins.parallel.tensor import cut_layers


class Axes:
    """The axes of the ranks of one engine."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        """
        Args:
            config: of the engine; all ranks have the same.
            device: of its collectives.

        Raises:
            ValueError: the ranks cannot be shared out.
        """
        self.data = config.data_ranks(dist.get_world_size())
        """Ranks, or groups of ranks, with sequences of their own."""
        alike = dist.get_world_size() // self.data
        self.data_rank = dist.get_rank() // alike
        self.mesh: DeviceMesh | None = None
        """data x context x tensor; None where all ranks are on the data axis."""
        self.shards = all_ranks(device)
        """Over which parameters are partitioned by rows: data x context."""
        self._alike: dist.ProcessGroup | None = None
        """Ranks with the same sequences: context x tensor."""
        if alike > 1:
            shape = self.data, config.context, config.tensor
            self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context", "tensor"))
            self.shards = self.mesh["data", "context"]._flatten("shards")
            self._alike = self.mesh["context", "tensor"]._flatten("alike").get_group()
        self.experts = None if config.expert == 1 else _expert_mesh(config.expert, device)
        """The same ranks otherwise: `expert` have different experts, `copies` the same ones, which they partition."""

    def of_axis(self, name: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one on an axis alone; None: all."""
        return None if self.mesh is None else self.mesh.get_group(name)

    def share(self, model: nn.Module) -> None:
        """Let the ranks of the context and tensor axes compute `model` together, in place.

        Raises:
            ValueError: it cannot be shared so.
        """
        if self.mesh is None:
            return
        tensor = self.mesh["tensor"]
        if tensor.size() > 1:
            cut_layers(model, tensor)
        if self.mesh["context"].size() > 1:
            share_rows(model, self.mesh.get_group("context"), tensor.size())

    def pooled(self, batch: Batch) -> tuple[Batch, slice]:
        """The sequences of all ranks that compute together, and which tokens of these are of `batch`."""
        if self._alike is None:
            return batch, slice(None)
        parts: list[Batch] = [batch] * self._alike.size()
        dist.all_gather_object(parts, batch, group=self._alike)
        before = sum(part.num_tokens for part in parts[: self._alike.rank()])
        return Batch.concat(parts), slice(before, before + batch.num_tokens)

    def summed(self, values: Tensor) -> Tensor:
        """The sum over the data axis, in place. Ranks that compute together have the same values."""
        dist.all_reduce(values, group=self.of_axis("data"))
        return values


def _expert_mesh(size: int, device: torch.device) -> DeviceMesh:
    shape = dist.get_world_size() // size, size
    return init_device_mesh(device.type, shape, mesh_dim_names=("copies", "expert"))


def all_ranks(device: torch.device) -> DeviceMesh:
    """The mesh of one axis that holds all ranks."""
    assert dist.group.WORLD is not None
    return DeviceMesh.from_group(dist.group.WORLD, device.type)


def share_rows(model: nn.Module, group: dist.ProcessGroup, tensor: int = 1) -> None:
    """Let the ranks of a group compute each row of `model` together, of whose heads each of so many ranks of the tensor
    axis has a share.

    Raises:
        ValueError: the model's sequences are padded, or its heads or positions cannot be shared.
    """
    inner: Any = getattr(model, "backbone", model)
    if not packs(inner):
        raise ValueError(
            f"parallel.context={group.size()} shares packed rows, and {type(inner).__name__} pads its sequences; set "
            "train.packing=true for the reason, or parallel.context=1"
        )
    text: Any = inner.config.get_text_config()
    heads = text.num_attention_heads // tensor
    if heads % group.size():
        raise ValueError(
            f"parallel.context={group.size()} does not divide the {heads} attention heads of {type(inner).__name__}, "
            f"which the ranks share after parallel.tensor={tensor}; set a divisor of them"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(
            f"the rotary positions of {type(inner).__name__} ({kind}) depend on the longest sequence, and a rank of "
            f"parallel.context={group.size()} sees a part of it; set parallel.context=1"
        )
    use_own_attention(inner)
    mark_context(inner, Context(group))
