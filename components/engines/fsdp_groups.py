"""How torch's FSDP2 (`fully_shard`) cuts a model: each layer is a group, and so is what no layer has."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard


def partition(
    model: nn.Module,
    device: torch.device,
    precision: MixedPrecisionPolicy,
    mesh: DeviceMesh,
    *,
    offload: bool,
    layers_let_go: bool,
    rest_lets_go: bool = False,
) -> list[FSDPModule]:
    """Partition `model` by rows over the ranks of a mesh, in place.

    Args:
        model: on any device.
        device: where its passes are.
        precision: of passes and gradients.
        mesh: of one axis.
        offload: what each rank keeps is in host memory.
        layers_let_go: gathered parameters of a layer are let go of after its forward pass.
        rest_lets_go: and those of what no layer has.

    Returns:
        The groups, of which the last is what no layer has.
    """
    kept = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    # transformers says which of its modules are layers.
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in names and module is not model]
    groups = []
    # The innermost first, should layers have layers in them.
    for module in [*reversed(layers), model]:
        lets_go = rest_lets_go if module is model else layers_let_go
        groups.append(
            fully_shard(module, mesh=mesh, reshard_after_forward=lets_go, mp_policy=precision, offload_policy=kept)
        )
    return groups
