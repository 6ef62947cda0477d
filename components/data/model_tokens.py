"""Tokens that a model's files and its chat template use: those that end a response, and those without an embedding."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.net.hub import cached_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS, _CHECKED, _TURN_END = "embedding_rows", "checked_template", "turn_end"
"""Attributes of a tokenizer: the rows of the model's embedding and the model, the template that was checked against
them, and a template with the token that ends its turns.
"""
_RESPONSE = "troupe"
"""Text of the assistant's turn in sample conversations."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
_USER, _ASSISTANT = {"role": "user", "content": "hello"}, {"role": "assistant", "content": _RESPONSE}
CONVERSATIONS: tuple[tuple[list[dict[str, Any]], dict[str, Any]], ...] = (
    ([_USER], {"add_generation_prompt": True}),
    ([_USER, _ASSISTANT], {}),
    ([{"role": "system", "content": "be brief"}, _USER, _ASSISTANT, _USER], {"add_generation_prompt": True}),
    ([_USER], {"add_generation_prompt": True, "tools": [_TOOL]}),
    (
        [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "1", "name": "add", "tool_call_id": "call00000"},
            _ASSISTANT,
        ],
        {"tools": [_TOOL]},
    ),
)
"""Conversations, and arguments of the chat template, that together use every role and the tools."""


def turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token that the chat template writes after an assistant's turn.

    None without a template, and where anything else than one special token and blanks follows the turn. A template is
    asked once for a tokenizer.
    """
    known = getattr(tokenizer, _TURN_END, None)
    if known is None or known[0] != tokenizer.chat_template:
        known = tokenizer.chat_template, _find_turn_end(tokenizer)
        setattr(tokenizer, _TURN_END, known)
    return known[1]


def _find_turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    text = _rendered(tokenizer, [_USER, _ASSISTANT])
    _, response, end = text.rpartition(_RESPONSE)
    if not response:
        return None
    token = end.strip()
    special = {added.content: index for index, added in tokenizer.added_tokens_decoder.items() if added.special}
    return special.get(token)


def end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a response: the tokenizer's end token, then the one that ends a turn, if another."""
    ids = [tokenizer.eos_token_id, turn_end_id(tokenizer)]
    return list(dict.fromkeys(index for index in ids if isinstance(index, int)))


def embedding_rows(path: str | Path) -> int | None:
    """Return the vocabulary size in the config.json of a model; None where there is none."""
    folder = Path(path).expanduser()
    try:
        if not folder.is_dir():
            folder = cached_folder(str(path))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rows = config.get("text_config", config).get("vocab_size", config.get("vocab_size"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # what is wrong with a config.json is reported where the model is checked
    return rows if isinstance(rows, int) else None


def limit_rows(tokenizer: PreTrainedTokenizerBase, model_path: str | Path) -> None:
    """Let `check_ids` refuse tokens that a model has no row for, and refuse such a token that every sequence can have.

    Args:
        tokenizer: the limit is an attribute of it, which no file gets.
        model_path: the model that reads its tokens; without a config.json there is no limit.

    Raises:
        ValueError: the end token, the padding token or the first token of every text has no row.
    """
    rows = embedding_rows(model_path)
    setattr(tokenizer, _ROWS, (sys.maxsize if rows is None else rows, str(model_path)))
    named = {"eos_token": tokenizer.eos_token_id, "pad_token": tokenizer.pad_token_id}
    named["bos_token"] = next(iter(tokenizer("a")["input_ids"]), None)
    for name, index in named.items():
        if isinstance(index, int):
            check_ids([index], tokenizer, f"{name} of the tokenizer")


def check_ids(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Check that the model has an embedding for each token.

    Args:
        ids: of a text.
        tokenizer: loaded by `load_tokenizer`; for any other nothing is known, and nothing is checked.
        where: the text, for the message.

    Raises:
        ValueError: a token is beyond the rows of the embedding.
    """
    rows, model_path = getattr(tokenizer, _ROWS, (sys.maxsize, ""))
    largest = max(ids, default=-1)
    if largest >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(
            f"{where} has the token {token!r} (id {largest}), for which the model {model_path} has no embedding: it "
            f"has {rows} rows (vocab_size), for ids up to {rows - 1}; use a template and texts without this token, the "
            "tokenizer that belongs to the model, or a model with more rows (resize_token_embeddings)"
        )


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model has an embedding for each token that the chat template writes, for any role and tools.

    A template is checked once for a tokenizer.

    Raises:
        ValueError: it has none for some token.
    """
    if not hasattr(tokenizer, _ROWS) or getattr(tokenizer, _CHECKED, None) == tokenizer.chat_template:
        return
    for messages, options in CONVERSATIONS:
        ids = tokenizer(_rendered(tokenizer, messages, **options), add_special_tokens=False)["input_ids"]
        check_ids(ids, tokenizer, "the text that the chat template writes")
    setattr(tokenizer, _CHECKED, tokenizer.chat_template)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """Return what the chat template makes of a conversation; nothing where it refuses it."""
    if not tokenizer.chat_template:
        return ""
    try:
        text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **options)
    except Exception:  # noqa: BLE001 - a template is a program, and may refuse a role in any way
        return ""
    return str(text)
