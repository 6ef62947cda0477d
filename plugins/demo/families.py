"""Shapes of the demonstration's models, by `model_type`. This module imports without torch."""

from __future__ import annotations

from typing import Any

DENSE = "qwen2"
"""Family of the demonstration."""
SHAPE: dict[str, Any] = {
    "model_type": DENSE,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""Shape of the dense models that tiny_model.py makes."""
# vLLM's loader of gpt_oss does not tie embeddings. Its CPU kernels take heads and experts in multiples of 32.
_MIXTURE = {"head_dim": 32, "num_experts_per_tok": 2, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    DENSE: SHAPE,
    "qwen3_moe": SHAPE | _MIXTURE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 128},
    "gpt_oss": SHAPE
    | _MIXTURE
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "intermediate_size": 128,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Shapes by family. Two of eight experts compute as much per token as two thirds of the dense layer."""


def shape_of(family: str) -> dict[str, Any]:
    """Return the shape of the models of a family.

    Raises:
        ValueError: no shape is defined for the family.
    """
    if family not in FAMILIES:
        raise ValueError(f"there is no tiny model of the family {family!r}; set one of: {', '.join(FAMILIES)}")
    return FAMILIES[family]
