"""How torch's FSDP2 (`fully_shard`) cuts a model: each layer is a group, and so is what no layer has."""

from __future__ import annotations

from collections.abc import Sequence

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
    experts: Sequence[nn.Module] = (),
    copies: DeviceMesh | None = None,
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
        experts: modules of layers that are partitioned apart, over the ranks that have the same experts.
        copies: these ranks.

    Returns:
        The groups, of which the last is what no layer has.
    """
    kept = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    groups = list[FSDPModule]()
    for module in experts:
        assert copies is not None
        group = fully_shard(
            module, mesh=copies, reshard_after_forward=layers_let_go, mp_policy=precision, offload_policy=kept
        )
        # Their gradient is already the sum over the ranks whose tokens they had, and the others divide by all ranks.
        group.set_gradient_divide_factor(float(mesh.size()))
        # gloo cannot divide while it adds. Alone a rank adds nothing, and torch would then divide twice.
        group.set_force_sum_reduction_for_comms(device.type == "cpu" and copies.size() > 1)
        groups.append(group)
    # The innermost first, should layers have layers in them.
    for module in [*reversed(layers_of(model)), model]:
        lets_go = rest_lets_go if module is model else layers_let_go
        groups.append(
            fully_shard(module, mesh=mesh, reshard_after_forward=lets_go, mp_policy=precision, offload_policy=kept)
        )
    return groups


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that transformers calls layers."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names and module is not model]
