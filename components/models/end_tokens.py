"""Tokens that end a response: the union of all end tokens that the files of a model name.

Tokenizer, config.json, generation_config.json and chat template often disagree. For example, a base model that was
tuned for chat ends its turns with a token that its generation_config.json does not name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.data.model_tokens import end_ids

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def use_end_tokens(model: Any, path: str | Path) -> None:
    """Set `eos_token_id` of a model to all tokens that end a response. Exports of the model contain them too.

    Args:
        model: model of transformers that was loaded from `path`. A model that cannot generate is unchanged.
        path: path to the model and its tokenizer.
    """
    if not model.can_generate():
        return
    by_tokenizer = tokenizer_ends(path)
    named = set(listed_ids(model.generation_config.eos_token_id))
    every = named | set(listed_ids(model.config.eos_token_id)) | set(by_tokenizer)
    if every != named:
        model.generation_config.eos_token_id = _as_setting(every)
    # config.json is changed only if it lacks an end of the tokenizer. Otherwise exports keep it as it was.
    if not set(by_tokenizer) <= set(listed_ids(model.config.eos_token_id)):
        model.config.eos_token_id = _as_setting(every)


def tokenizer_ends(path: str | Path) -> list[int]:
    """Return the ends that the tokenizer and its chat template name; none for a folder without a tokenizer."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return []
    from transformers import AutoTokenizer

    try:
        return end_ids(AutoTokenizer.from_pretrained(path, trust_remote_code=False))
    except (OSError, ValueError):
        # A model may be loaded without its tokenizer. Callers that need the tokenizer load it and get the error.
        return []


def listed_ids(setting: int | list[int] | None) -> list[int]:
    """Return the ids of a setting as a list. A negative id is the old notation for no end token, and is left out."""
    if isinstance(setting, int):
        setting = [setting]
    return [index for index in setting or () if index >= 0]


def _as_setting(ids: set[int]) -> int | list[int]:
    """Return one id as a number and several as a list."""
    return sorted(ids) if len(ids) > 1 else next(iter(ids))
