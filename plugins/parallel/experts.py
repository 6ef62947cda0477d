"""Expert parallelism: ranks hold whole experts of a mixture, and exchange tokens for them.

Each rank has sequences of its own. In every layer that has experts, a token's state goes to the ranks of its experts,
and what these make of it comes back and is weighted (Lepikhin et al. 2020, "GShard"). transformers exchanges, by its
dispatch of tokens; which parameters are experts, the model's own plan says. Ranks with the same experts partition them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plugins.parallel.tensor import plan_name

_EXPERTS = "grouped_gemm"
"""Style in transformers' plans of parameters whose rows are experts."""


def share_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Let each rank of an axis keep its share of the experts of all layers, in place.

    Args:
        model: policy or value model, perhaps made empty.
        mesh: of the axis.

    Returns:
        The modules whose parameters have become DTensors over the axis.

    Raises:
        ValueError: the model has no experts, or they cannot be shared out.
    """
    from transformers.distributed.tensor_parallel import apply_expert_parallelism

    inner: Any = getattr(model, "backbone", model)
    names = [name for name, style in (inner.ep_plan or {}).items() if style == _EXPERTS]
    homes = {name.rpartition(".")[0] for name in names}
    found = [module for name, module in inner.named_modules() if plan_name(name) in homes]
    if not found:
        raise ValueError(
            f"parallel.expert={mesh.size()} shares out the experts of a mixture, and transformers has no plan for "
            f"{type(inner).__name__} that names experts; set parallel.expert=1"
        )
    count = found[0].num_experts
    if count % mesh.size():
        raise ValueError(
            f"parallel.expert={mesh.size()} does not divide the {count} experts of {type(inner).__name__}; set a "
            "divisor of them"
        )
    plan = dict.fromkeys(names, _EXPERTS) | dict.fromkeys(homes, "ep_dispatch_experts")
    nobody: Any = None
    apply_expert_parallelism(inner, mesh, nobody, plan)
    return found
