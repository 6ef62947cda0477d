"""Tiny models with chat templates. Their files may disagree about special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plugins.demo.tiny_model import learnt_tokenizer, tiny_model

TURN_END = "<|im_end|>"
THINK = "<think>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTES = 259
"""Number of tokens before special ones are added: <pad>, <bos>, <eos> and all bytes."""
START_ID, END_ID, THINK_ID = BYTES, BYTES + 1, BYTES + 2


def chat_model(
    folder: Path, *, template: str | None = CHATML, eos: str = "<eos>", rows: int | None = None, **generation: Any
) -> Path:
    """Write a model whose tokenizer has <|im_start|>, <|im_end|> and <think> after its 259 tokens.

    Args:
        folder: to write to.
        template: of chats.
        eos: end token of the tokenizer; config.json and generation_config.json name <eos> (2).
        rows: of the embedding. Default: one for each token.
        generation: replaces what generation_config.json has.
    """
    tokenizer = learnt_tokenizer([], BYTES)
    model = tiny_model(tokenizer, 0, hidden=32, layers=1, intermediate=64)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", TURN_END, THINK]})
    model.resize_token_embeddings(rows or len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.eos_token = eos
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
