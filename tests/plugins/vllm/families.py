"""Tiny random models of the families that transformers and vLLM share, in sizes supported by vLLM's CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 64
FIXED = ".e_score_correction_bias"
"""A parameter without a gradient, which is not trained."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_ROUTED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**_ROUTED, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    "qwen3_moe": _ROUTED,
    "qwen3_moe_padded": {**_ROUTED, "moe_intermediate_size": 48},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "intermediate_size": 32},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "shared_intermediate_size": 64,
    },
    "glm4_moe": _GROUPED,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size": 32,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 1,
    },
}
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_tied": {"tie_word_embeddings": True},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": None},
    "granite": {},
    "glm4": {},
    "stablelm": {},
    "gpt2": {"n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 128, "tie_word_embeddings": True},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "tie_word_embeddings": True},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": {},
}


def write_family(family: str, folder: Path) -> Path:
    """Write a random model of the family. Its weights are so large that each of them affects its log-probabilities."""
    sizes = _SIZES | (MIXTURES | DENSE)[family]
    config = AutoConfig.for_model(
        family.removesuffix("_tied").removesuffix("_padded"), **({"tie_word_embeddings": False} | sizes)
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(FIXED):
                continue
            spread = 0.15 if parameter.dim() > 1 else 0.05
            parameter.add_(torch.randn(parameter.shape) * spread)
    model.save_pretrained(folder)
    return folder


def change(model: torch.nn.Module, seed: int, spread: float = 0.05) -> None:
    """Change every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(FIXED):
                continue
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)


def weights_of(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return names and values of the parameters, as a training engine gathers them."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
