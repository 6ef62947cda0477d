"""Tokens that end a response, for engines that read the model's files themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.data.model_tokens import embedding_rows
from components.models.end_tokens import listed_ids, tokenizer_ends


def end_tokens_of(path: str | Path) -> list[int]:
    """Return the tokens that end a response of the model at `path`, for an engine that loads the model itself.

    Ids beyond the model's vocabulary are left out: they are never sampled, and vLLM refuses requests that name one.
    """
    from transformers import AutoConfig

    from components.models.disk.empty_model import generation_config

    ids = {*listed_ids(generation_config(path).eos_token_id), *tokenizer_ends(path)}
    config: Any = AutoConfig.from_pretrained(path)
    ids |= set(listed_ids(getattr(config, "eos_token_id", None)))
    rows = embedding_rows(path)
    return sorted(index for index in ids if rows is None or index < rows)
