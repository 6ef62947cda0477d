"""In which types a model computes. All whose log-probabilities are compared compute alike: a policy, its reference, and
the engine that samples.

    fp32            float32 weights, float32 products
    bf16            bfloat16 weights, bfloat16 products
    bf16_autocast   float32 weights, bfloat16 products; what is between the products is float32
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def compute_in(model: nn.Module, precision: str, device: torch.device) -> None:
    """Let the passes of `model` on `device` compute in `precision`, whose `config.weight_type` it has.

    Call it before a library wraps the model: DeepSpeed switches off what is around itself.
    """
    if precision == "bf16_autocast":
        autocast = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
        model.forward = autocast(model.forward)


def round_products(model: nn.Module, precision: str) -> None:
    """Keep the weights of a model that is not trained in the type of the products that they are in: with bf16_autocast
    half of the memory, and the same results, since each product would round them anew.

    Weights that something else than a linear layer reads too, as tied embeddings, stay as they are.
    """
    if precision != "bf16_autocast":
        return
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    others = {id(tensor) for module in model.modules() if type(module) is not nn.Linear for tensor in _own(module)}
    for module in linear:
        if id(module.weight) not in others:
            module.weight.data = module.weight.data.to(torch.bfloat16)


def _own(module: nn.Module) -> list[Tensor]:
    return list(module.parameters(recurse=False))


def as_multiplied(*tensors: Tensor) -> list[Tensor]:
    """Tensors as a matrix product takes them: under autocast in its type."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors]
