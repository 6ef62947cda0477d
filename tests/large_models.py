"""Folders of large models without weights: config.json of the published size, and a small tokenizer that is padded to
the published vocabulary. Texts are encoded byte by byte.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|endoftext|>"
START = "<|im_start|>"
TURN_END = "<|im_end|>"
FIRST_SPECIAL = 151643
"""Id of the first special token of the Qwen family."""
_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "bos_token_id": FIRST_SPECIAL,
    "eos_token_id": FIRST_SPECIAL + 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _QWEN2
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "Qwen2.5-7B": _QWEN2
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
    },
    "Qwen2.5-32B": _QWEN2
    | {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "max_window_layers": 70,
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": _QWEN2
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "vocab_size": 151936,
    },
}
"""Content of config.json as published by the Qwen team, without fields that only name a version."""


@cache
def padded_tokenizer(first_special: int = FIRST_SPECIAL) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, padded with tokens that no text contains up to its special tokens."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"filler{number}" for number in range(len(pieces), first_special)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (END, START, TURN_END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=END,
        eos_token=TURN_END,
        unk_token=END,
        additional_special_tokens=[START],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def large_model(folder: Path, name: str, *, template: str = CHATML, tokens: int = FIRST_SPECIAL, **config: Any) -> Path:
    """Write a folder of a large model without weights.

    Args:
        folder: folder to write.
        name: a key of `CONFIGS`.
        template: chat template of the tokenizer.
        tokens: number of tokens before the special ones.
        config: fields of config.json to change.
    """
    tokenizer = padded_tokenizer(tokens)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | config, indent=2))
    settings = {"eos_token_id": [FIRST_SPECIAL + 2, FIRST_SPECIAL], "do_sample": True, "temperature": 0.7}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder
