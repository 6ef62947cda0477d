"""Replacement of the norms, gated activations and rotary embeddings of a model of transformers by fused kernels.

Only the modules of this model change, not their classes, so other models in the process stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from plugins.layer_kernels.gate import GatedActivation
from plugins.layer_kernels.norm import RMSNorm
from plugins.layer_kernels.rotary import apply_rotary

PLAIN_WEIGHTS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Phi3RMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
"""Norms whose result is multiplied by the weights."""
SHIFTED_WEIGHTS = frozenset({"GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"})
"""Norms whose result is multiplied by 1 + weights."""
GATED = frozenset({"GemmaMLP", "Gemma2MLP", "Gemma3MLP", "LlamaMLP", "MistralMLP", "Phi3MLP", "Qwen2MLP", "Qwen3MLP"})
"""Layers with a gated activation."""
IS_GELU = {"SiLUActivation": False, "SiLU": False, "GELUTanh": True}
"""Activations with a kernel."""
ROTARY = "apply_rotary_pos_emb"
"""Function of a model's module that rotates queries and keys."""


def use_layer_kernels(model: nn.Module) -> list[str]:
    """Use fused kernels in the layers of a model, in place. Return a description of each kind of module without one."""
    left: Counter[str] = Counter()
    for module in model.modules():
        name = type(module).__name__
        forward = _forward_of(module, name)
        if forward is not None:
            module.forward = MethodType(forward, module)
        elif name.endswith(("Norm", "MLP", "Attention", "Experts")):
            left[name] += 1
    return [f"{count} {name}" for name, count in left.items()]


def _forward_of(module: Any, name: str) -> Callable[..., Any] | None:
    """Return the fused forward function of a module, or None if there is none."""
    if name in PLAIN_WEIGHTS:
        return partial(_norm, eps=module.variance_epsilon, offset=0.0)
    if name in SHIFTED_WEIGHTS:
        return partial(_norm, eps=module.eps, offset=1.0)
    if name in GATED:
        forward, activation = _gated, getattr(module, "act_fn", None)
        if name == "Phi3MLP":
            forward, activation = _gated_halves, module.activation_fn
        is_gelu = IS_GELU.get(type(activation).__name__)
        if is_gelu is None:
            return None
        return partial(forward, gelu=is_gelu)
    method: Any = getattr(type(module), "forward", None)
    if name.endswith("Attention") and isinstance(method, FunctionType) and ROTARY in method.__code__.co_names:
        return _with_rotary(method)
    return None


def _norm(module: Any, x: Tensor, *, eps: float, offset: float) -> Tensor:
    weight: Tensor = module.weight
    # As in transformers: a norm with an offset keeps the dtype of its input.
    dtype = x.dtype
    if not offset:
        dtype = torch.promote_types(x.dtype, weight.dtype)
    return RMSNorm.apply(x, weight, eps, offset, dtype)


def _gated(module: Any, x: Tensor, *, gelu: bool) -> Tensor:
    return module.down_proj(GatedActivation.apply(module.gate_proj(x), module.up_proj(x), gelu))


def _gated_halves(module: Any, x: Tensor, *, gelu: bool) -> Tensor:
    gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    return module.down_proj(GatedActivation.apply(gate, up, gelu))


def _with_rotary(forward: FunctionType) -> Callable[..., Any]:
    """Return a copy of a function that calls the fused rotary embedding. Its module keeps the plain one."""
    plain = forward.__globals__[ROTARY]
    fused = partial(apply_rotary, plain=plain)
    copy = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTARY: fused},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
