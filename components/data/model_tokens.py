"""Tokens of a model and its chat template: end tokens of responses, and tokens without an embedding."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.net.hub import cached_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS = "embedding_rows"
"""Attribute that is set on a tokenizer: the number of rows of the model's embedding, and the path of the model."""
_CHECKED = "checked_template"
"""Attribute that is set on a tokenizer: the chat template that was checked against these rows."""
_TURN_END = "turn_end"
"""Attribute that is set on a tokenizer: a chat template, and the token that ends its turns."""
_RESPONSE = "troupe"
"""Text of the assistant's message in sample conversations."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
_USER = {"role": "user", "content": "hello"}
_ASSISTANT = {"role": "assistant", "content": _RESPONSE}
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
"""Sample conversations with arguments of the chat template. Together they use every role and tools."""


def turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the special token that the chat template writes after an assistant's message.

    None without a template, and if anything but one special token and white space follows the message. The result is
    cached on the tokenizer.
    """
    cached = getattr(tokenizer, _TURN_END, None)
    # The template is part of the cache, because it can be replaced after the tokenizer was loaded.
    if cached is None or cached[0] != tokenizer.chat_template:
        cached = (tokenizer.chat_template, _find_turn_end(tokenizer))
        setattr(tokenizer, _TURN_END, cached)
    return cached[1]


def _find_turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    text = _rendered(tokenizer, [_USER, _ASSISTANT])
    _, response, end = text.rpartition(_RESPONSE)
    if not response:
        return None
    # Only special tokens: an ordinary word after the message would also occur inside of responses.
    token = end.strip()
    special = {added.content: index for index, added in tokenizer.added_tokens_decoder.items() if added.special}
    return special.get(token)


def end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that end a response: the end token, and the token that ends a turn if it differs."""
    ids = [tokenizer.eos_token_id, turn_end_id(tokenizer)]
    return list(dict.fromkeys(index for index in ids if isinstance(index, int)))


def embedding_rows(path: str | Path) -> int | None:
    """Return the vocabulary size in the config.json of a model, or None if it cannot be read."""
    folder = Path(path).expanduser()
    try:
        if not folder.is_dir():
            folder = cached_folder(str(path))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # Models of several modalities have the vocabulary size in a nested configuration.
        rows = config.get("text_config", config).get("vocab_size", config.get("vocab_size"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # errors of a config.json are reported where the model is checked
    return rows if isinstance(rows, int) else None


def limit_rows(tokenizer: PreTrainedTokenizerBase, model_path: str | Path) -> None:
    """Set the limit of token ids for `check_ids`, and check the tokens that every sequence may have.

    Args:
        tokenizer: the limit is set as an attribute of it, which is not saved.
        model_path: model that reads the tokens. Without a config.json there is no limit.

    Raises:
        ValueError: the end token, the padding token or the first token of every text has no embedding.
    """
    rows = embedding_rows(model_path)
    if rows is None:
        rows = sys.maxsize
    setattr(tokenizer, _ROWS, (rows, str(model_path)))
    # Checked here, because every sequence has these tokens, while others depend on the data.
    named = {"eos_token": tokenizer.eos_token_id, "pad_token": tokenizer.pad_token_id}
    # The first token of a text is the BOS token of tokenizers that add one.
    named["bos_token"] = next(iter(tokenizer("a")["input_ids"]), None)
    for name, index in named.items():
        if isinstance(index, int):
            check_ids([index], tokenizer, f"{name} of the tokenizer")


def check_ids(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Check that the model has an embedding for each token.

    Args:
        ids: token ids of a text.
        tokenizer: a tokenizer from `load_tokenizer`. For any other one nothing is checked.
        where: description of the text, for the error message.

    Raises:
        ValueError: an id is not below the number of rows of the embedding.
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
    """Check that the model has an embedding for each token that the chat template writes, for all roles and tools.

    A template is checked once per tokenizer.

    Raises:
        ValueError: a token has no embedding.
    """
    if not hasattr(tokenizer, _ROWS) or getattr(tokenizer, _CHECKED, None) == tokenizer.chat_template:
        return
    for messages, options in CONVERSATIONS:
        ids = tokenizer(_rendered(tokenizer, messages, **options), add_special_tokens=False)["input_ids"]
        check_ids(ids, tokenizer, "the text that the chat template writes")
    setattr(tokenizer, _CHECKED, tokenizer.chat_template)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """Render a conversation with the chat template. Return an empty text if the template rejects it."""
    if not tokenizer.chat_template:
        return ""
    try:
        text = tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **options)
    except Exception:  # noqa: BLE001 - a template is a program, and may refuse a role in any way
        return ""
    return str(text)
