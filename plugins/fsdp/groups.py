"""Sharding of a model with torch's FSDP2 (`fully_shard`): each layer is a group, and the remaining parameters
another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from components.models.layers import layers_of


def partition(
    model: nn.Module,
    device: torch.device,
    precision: MixedPrecisionPolicy,
    mesh: DeviceMesh,
    *,
    offload: bool,
    layers_let_go: bool,
    rest_lets_go: bool = False,
    experts: Sequence[nn.Module] = (),
    copies: DeviceMesh | None = None,
) -> list[FSDPModule]:
    """Shard `model` by rows over the ranks of a mesh, in place.

    Args:
        model: model on any device.
        device: device on which passes are computed.
        precision: dtypes of passes and of the reduction of gradients.
        mesh: ranks, as a mesh of one axis.
        offload: keep the shards in host memory.
        layers_let_go: free the gathered parameters of a layer after its forward pass.
        rest_lets_go: free the gathered parameters outside of layers after the forward pass.
        experts: modules of layers that are sharded separately, over the ranks that have the same experts.
        copies: ranks that have the same experts.

    Returns:
        The groups. The last one has the parameters outside of layers.
    """
    kept = OffloadPolicy()
    if offload:
        kept = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    groups = list[FSDPModule]()
    for module in experts:
        assert copies is not None
        group = fully_shard(
            module, mesh=copies, reshard_after_forward=layers_let_go, mp_policy=precision, offload_policy=kept
        )
        # The gradient of experts is already the sum over the ranks whose tokens they processed. Dividing by the number
        # of all ranks gives the average that the other parameters have.
        group.set_gradient_divide_factor(float(mesh.size()))
        # gloo cannot divide within a reduction, so the sum is forced there. With a single rank nothing is reduced, and
        # torch would then divide twice.
        group.set_force_sum_reduction_for_comms(device.type == "cpu" and copies.size() > 1)
        groups.append(group)
    # Inner modules come first, because `fully_shard` must be applied to nested layers before the layer around them.
    for module in [*reversed(layers_of(model)), model]:
        lets_go = layers_let_go
        if module is model:
            lets_go = rest_lets_go
        groups.append(
            fully_shard(module, mesh=mesh, reshard_after_forward=lets_go, mp_policy=precision, offload_policy=kept)
        )
    return groups
