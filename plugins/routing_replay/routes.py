"""Routes of tokens as columns of a batch.

A route is the experts of one token in all routed layers. `Batch` has one number per token and column, so that eight
bytes of a route are the int64 number of a column.

Legend: `N` tokens of a batch end to end, `L` routed layers, `K` experts per token, `W` bytes of a route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from components.models.routers import ROUTES, route_columns

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NO_EXPERT = -1
"""Entry of a token whose experts are unknown."""


def expert_counts(config: Any) -> tuple[int, int]:
    """Return the number of experts of a layer and the number of experts per token, or 0 for an unknown one.

    Args:
        config: transformers' configuration of the model.
    """
    text = config.get_text_config()
    return _setting(text, _EXPERT_COUNTS), _setting(text, ("num_experts_per_tok",))


def to_columns(route_NLK: Tensor, experts: int) -> dict[str, Tensor]:
    """Return the columns of routes, each [N] int64.

    Args:
        route_NLK: [N, L, K] integers, the index of each chosen expert or `NO_EXPERT`.
        experts: number of experts of a layer.
    """
    # 0 stands for an unknown expert, so that padding of the last column is never read as expert 0.
    code_NW = (route_NLK.flatten(1) + 1).to(_code_type(experts)).contiguous().view(torch.uint8)
    missing = -code_NW.shape[1] % 8
    padded_NW = torch.nn.functional.pad(code_NW, (0, missing)).contiguous()
    return {f"{ROUTES}{i}": column_N.contiguous() for i, column_N in enumerate(padded_NW.view(torch.int64).unbind(1))}


def from_columns(columns: Mapping[str, Tensor], layers: int, top_k: int, experts: int) -> Tensor:
    """Return the routes, [N, L, K] int64. See `to_columns`.

    Args:
        columns: columns of a batch. Those that are not routes are ignored.
        layers: number of routed layers.
        top_k: number of experts per token.
        experts: number of experts of a layer.

    Raises:
        ValueError: the columns are missing or belong to a model with other layers or experts.
    """
    dtype = _code_type(experts)
    size = layers * top_k * dtype.itemsize
    names = route_columns(columns)
    expected = -(-size // 8)
    if len(names) != expected:
        raise ValueError(
            f"the batch has {len(names)} columns of routes, and {layers} layers with {top_k} of {experts} experts need "
            f"{expected}; pass the columns of `RoutingReplay.logprobs` on to the update"
        )
    code_NW = torch.stack([columns[f"{ROUTES}{i}"] for i in range(expected)], 1).view(torch.uint8)[:, :size]
    return code_NW.contiguous().view(dtype).long().unflatten(1, (layers, top_k)) - 1


def _code_type(experts: int) -> torch.dtype:
    """Return the integer type of an expert's code, which is its index plus one."""
    return torch.uint8 if experts < 256 else torch.int16


def _setting(config: Any, names: tuple[str, ...]) -> int:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
