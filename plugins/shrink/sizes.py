"""Reduction of the sizes in a config.json. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD_SIZE = 8
"""Size of an attention head of the small model."""
HEAD_SIZE_OF_KERNELS = 32
"""Size of an attention head for engines whose kernels need more, such as those of vLLM on a CPU."""
FEED_FORWARD = 64
"""Intermediate size of an MLP, and of an expert."""
EXPERTS = 4
"""Maximum number of experts of a layer."""
EXPERTS_PER_TOKEN = 2
"""Maximum number of experts that compute each token."""
LAYERS = 2
"""Minimum number of layers, if the large model has as many. There is one layer of each kind at least."""

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads",)
_WIDTHS = ("hidden_size", "n_embd", "word_embed_proj_dim")
_FEED_FORWARDS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "n_inner")
_EXPERTS = ("num_experts", "num_local_experts")
_DROPPED = ("quantization_config", "transformers_weights")
"""Settings of the weight files. The small model has other files."""


def small_config(config: Mapping[str, Any], head_size: int = HEAD_SIZE) -> dict[str, Any]:
    """Return the content of the config.json of a small model of the same architecture.

    Args:
        config: content of the config.json of the large model.
        head_size: size of an attention head of the small model.
    """
    small = {name: value for name, value in config.items() if name not in _DROPPED}
    # Models of several modalities hold the sizes of their language model in a nested object.
    if isinstance(small.get("text_config"), Mapping):
        return small | {"text_config": small_config(small["text_config"], head_size)}
    layers = _first(small, _LAYERS)
    if layers is not None:
        small |= _small_layers(small, layers)
    heads = _first(small, _HEADS)
    if heads is None:
        return small
    key_heads = _first(small, _KEY_HEADS) or heads
    # Two key heads at least can be divided over two ranks. Grouped attention stays grouped, so that the same code runs.
    small_key_heads = min(key_heads, 2)
    small_heads = small_key_heads * min(heads // key_heads, 2)
    _set(small, _HEADS, small_heads)
    _set(small, _KEY_HEADS, small_key_heads)
    _set(small, _WIDTHS, small_heads * head_size)
    _set(small, ("head_dim",), head_size)
    for name in _FEED_FORWARDS:
        _set(small, (name,), min(FEED_FORWARD, int(small.get(name) or FEED_FORWARD)))
    experts = _first(small, _EXPERTS)
    if experts:
        _set(small, _EXPERTS, min(EXPERTS, experts))
        per_token = min(EXPERTS_PER_TOKEN, int(small.get("num_experts_per_tok") or 1))
        _set(small, ("num_experts_per_tok",), per_token)
    return small


def _small_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the settings of the layers that are kept."""
    kinds: list[Any] = list(config.get("layer_types") or [])
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    kept += [layer for layer in range(layers) if layer not in kept][: max(0, LAYERS - len(kept))]
    kept.sort()
    small: dict[str, Any] = {name: len(kept) for name in _LAYERS if name in config}
    for name, value in config.items():
        if isinstance(value, list) and len(value) == layers:
            small[name] = [value[layer] for layer in kept]
    # Numbers of layers beyond the last one have no meaning in the small model.
    if isinstance(config.get("mlp_only_layers"), list):
        small["mlp_only_layers"] = [kept.index(layer) for layer in config["mlp_only_layers"] if layer in kept]
    if isinstance(config.get("max_window_layers"), int):
        small["max_window_layers"] = min(len(kept), config["max_window_layers"])
    return small


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first of the names that the config sets to a number, or None."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _set(config: dict[str, Any], names: tuple[str, ...], value: int) -> None:
    """Set those of the names that the config has."""
    for name in names:
        if config.get(name) is not None:
            config[name] = value
