"""Precision in which a model computes. Models whose log-probabilities are compared (a policy, its reference and the
rollout engine) use the same precision.

    fp32            float32 weights, float32 products
    bf16            bfloat16 weights, bfloat16 products
    bf16_autocast   float32 weights, bfloat16 products; all other operations are float32
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def compute_in(model: nn.Module, precision: str, device: torch.device) -> None:
    """Enable autocast in the passes of `model` if `precision` needs it. The weights must have the dtype of
    `weight_type`.

    Call it before a library wraps the model, because DeepSpeed disables an autocast around itself.
    """
    if precision == "bf16_autocast":
        # The cache of autocast would keep a bfloat16 copy of every trained weight during a pass.
        autocast = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
        model.forward = autocast(model.forward)


def round_products(model: nn.Module, precision: str) -> None:
    """Round the weights of linear layers of a frozen model to bfloat16, for bf16_autocast.

    This halves their memory and does not change results, because autocast would round them in each product. Weights
    that other modules also use, such as tied embeddings, are unchanged.
    """
    if precision != "bf16_autocast":
        return
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    others = {id(w) for m in model.modules() if type(m) is not nn.Linear for w in m.parameters(recurse=False)}
    for module in linear:
        if id(module.weight) not in others:
            module.weight.data = module.weight.data.to(torch.bfloat16)


def as_multiplied(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in the dtype of matrix products, which is autocast's if autocast is enabled."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]
