"""Untrained models of a few thousand parameters with a byte-level tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(**changes: Any) -> PreTrainedTokenizerFast:
    """Create a tokenizer with a token per byte, after pad, bos and eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    named: dict[str, Any] = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **(named | {"chat_template": TEMPLATE} | changes))


def shape(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return a model configuration for this tokenizer."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def write_policy(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, **config: Any) -> Path:
    """Write a policy with random weights. `config` overrides its sizes."""
    tokenizer = tokenizer or byte_tokenizer()
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**(shape(tokenizer) | config))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_mixture(folder: Path, **config: Any) -> Path:
    """Write a mixture of experts with random weights."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    sizes: dict[str, Any] = shape(tokenizer) | {"moe_intermediate_size": 16, "num_experts_per_tok": 2} | config
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_reward_model(
    folder: Path, seed: int, tokenizer: PreTrainedTokenizerFast | None = None, **config: Any
) -> Path:
    """Write a reward model with random weights in the format of transformers."""
    tokenizer = tokenizer or byte_tokenizer()
    torch.manual_seed(seed)
    settings: dict[str, Any] = shape(tokenizer) | {"num_labels": 1} | config
    model = Qwen2ForSequenceClassification(Qwen2Config(**settings))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
