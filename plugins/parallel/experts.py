"""Expert parallelism: each rank holds a subset of the experts, and ranks exchange tokens.

Each rank has its own sequences. In every mixture layer the state of a token is sent to the ranks of its experts, and
their outputs are returned and weighted (Lepikhin et al. 2020, "GShard"). The exchange is transformers' dispatch of
tokens, and the model's expert-parallel plan names the parameters that are experts. Ranks with the same experts shard
them among each other.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plugins.parallel.tensor import plan_name

_EXPERTS = "grouped_gemm"
"""Style of parameters whose rows are experts, in transformers' plans."""


def share_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Distribute the experts of all layers over the ranks of an axis, in place.

    Args:
        model: policy or value model, possibly on the meta device.
        mesh: mesh of the expert axis.

    Returns:
        The modules whose parameters have become DTensors over the axis.

    Raises:
        ValueError: the model has no experts, or the number of ranks does not divide their number.
    """
    from transformers.distributed.tensor_parallel import apply_expert_parallelism

    inner: Any = getattr(model, "backbone", model)
    names = [name for name, style in (inner.ep_plan or {}).items() if style == _EXPERTS]
    homes = {name.rpartition(".")[0] for name in names}
    layers = [module for name, module in inner.named_modules() if plan_name(name) in homes]
    if not layers:
        raise ValueError(
            f"parallel.expert={mesh.size()} shares out the experts of a mixture, and transformers has no plan for "
            f"{type(inner).__name__} that names experts; set parallel.expert=1"
        )
    count = layers[0].num_experts
    if count % mesh.size():
        raise ValueError(
            f"parallel.expert={mesh.size()} does not divide the {count} experts of {type(inner).__name__}; set a "
            "divisor of them"
        )
    plan = dict.fromkeys(names, _EXPERTS) | dict.fromkeys(homes, "ep_dispatch_experts")
    no_tensor_mesh: Any = None
    apply_expert_parallelism(inner, mesh, no_tensor_mesh, plan)
    return layers
