"""Columns of data with a well-known meaning: each one is used, or its row is rejected.

All other columns are only passed to reward functions and agents. Supervised recipes list them as not used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.data.conversations import parse_tools, read_messages
from components.data.messages import TOOLS, is_blank

CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns with complete conversations."""
PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input")
"""Columns with prompts, in order of preference."""
RESPONSES = ("response", "completion", "output", "answer", "solution")
"""Columns with responses, in order of preference."""
LABELS = ("label", "answer", "solution", "ground_truth", "target", "reward_model.ground_truth")
"""Columns with labels, which a reward compares responses with. A dot separates a column from its field."""
PREFERENCES = ("chosen", "rejected")
"""Columns with the better and the worse response of a pair."""
SYSTEMS = ("system", "system_prompt")
"""Columns with system prompts."""
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Columns with inputs other than text."""
COMPANIONS = ("input", "context")
"""Columns that complete an `instruction`."""
WITHOUT_A_PLACE = {
    "history": "earlier turns; write the whole conversation as chat messages",
    "functions": "definitions of functions; give them as a column 'tools'",
    "documents": "documents for the chat template; write them into the prompt",
    "chat_template_kwargs": "arguments of the chat template; set model.chat_template to one with these values",
}
"""Columns that other libraries put into the model's input and that are not supported here -> the remedy."""


@dataclass(frozen=True)
class Prompt:
    """Prompt of a row."""

    value: Any
    """Text, chat messages, or any other value of the column."""
    columns: tuple[str, ...]
    """Columns that the prompt was read from."""


def filled(record: Mapping[str, Any], names: Iterable[str], ignored: Collection[str] = ()) -> list[str]:
    """Return the columns among `names` that are not blank and not ignored."""
    return [name for name in names if name not in ignored and not is_blank(record.get(name))]


def read_prompt(record: Mapping[str, Any], key: str, ignored: Collection[str] = ()) -> Prompt:
    """Read a column with a prompt: text, or chat messages in one of the forms of `read_messages`.

    An `instruction` is followed by a blank line and the text of its `input` or `context`, unless that is empty.

    Raises:
        ValueError: an `instruction` has more than one such column, or one that is not text.
    """
    value = record[key]
    # Alpaca's layout splits a prompt into an instruction and its input.
    companions: list[str] = []
    if key == "instruction" and isinstance(value, str):
        companions = filled(record, COMPANIONS, ignored)
    if not companions:
        messages = read_messages(value)
        if messages is not None:
            value = messages
        return Prompt(value, (key,))
    parts = [record[name] for name in companions]
    if len(parts) > 1 or not isinstance(parts[0], str):
        raise ValueError(
            f"columns {', '.join(map(repr, companions))} beside 'instruction' must be one column of text; name the "
            f"columns to leave out in data.ignored_columns={','.join(companions)}"
        )
    if value.strip():
        parts.insert(0, value)
    return Prompt("\n\n".join(parts), (key, *companions))


def read_system(record: Mapping[str, Any], ignored: Collection[str] = ()) -> tuple[str | None, list[str]]:
    """Return the system prompt of a row (None without one), and the columns that hold it.

    Raises:
        ValueError: it is not text, or two columns hold different ones.
    """
    names = filled(record, SYSTEMS, ignored)
    if not names:
        return None, []
    # Both columns may be filled if they agree.
    for name in names:
        if not isinstance(record[name], str) or record[name] != record[names[0]]:
            raise ValueError(
                f"column {name!r} must hold one system prompt as text, found {record[name]!r:.80}; correct it, or set "
                f"data.ignored_columns={name}"
            )
    return record[names[0]], names


def read_tools(record: Mapping[str, Any], ignored: Collection[str] = ()) -> list[dict[str, Any]]:
    """Read the definitions of tools of a row. The list is empty if the column is missing or blank."""
    if not filled(record, [TOOLS], ignored):
        return []
    return parse_tools(record[TOOLS])


def refuse_without_a_place(record: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """Reject columns with media, and those of `WITHOUT_A_PLACE`, because the model would not read them.

    Raises:
        ValueError: such a column is not blank. The message has the remedy.
    """
    if media := filled(record, MEDIA, ignored):
        raise ValueError(
            f"it has {', '.join(media)}, which the policy would not see; only text is supported: remove it, or set "
            f"data.ignored_columns={','.join(media)} to train without it"
        )
    for name in filled(record, WITHOUT_A_PLACE, ignored):
        raise ValueError(f"column {name!r} holds {WITHOUT_A_PLACE[name]}, or set data.ignored_columns={name}")


def refuse_weight(record: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """Raise a ValueError if a row has a weight other than 1, because all rows have the same weight."""
    for name in filled(record, ("weight", "sample_weight"), ignored):
        # A weight of 1 changes nothing, and many data sets have such a column.
        if record[name] != 1:
            raise ValueError(
                f"column {name!r} is {record[name]!r}, but all rows have the same weight; remove rows instead (a "
                f"message with 'weight': 0 is not learnt), or set data.ignored_columns={name}"
            )


def refuse_unread(
    record: Mapping[str, Any], names: Iterable[str], read: Sequence[str], ignored: Collection[str], remedy: str
) -> None:
    """Reject a row if the content of a column with a well-known meaning would not be read.

    Args:
        record: the row.
        names: names of the columns that are not read.
        read: all texts that the model reads from the row.
        ignored: columns that the user excludes.
        remedy: option that selects the columns, for the error message.

    Raises:
        ValueError: the content of a column would be lost.
    """
    for name in filled(record, names, ignored):
        value = record[name]
        if not _is_repeated(value, read):
            raise ValueError(
                f"column {name!r} holds {value!r:.80}, which the model would not read; {remedy}, or set "
                f"data.ignored_columns={name} to leave it out"
            )


def _is_repeated(value: Any, read: Sequence[str]) -> bool:
    """Return True if the model reads a value from other columns, or if the value contains all texts that it reads."""
    # Compared by text, because a column often repeats another one in a different form, such as messages.
    messages = read_messages(value)
    parts = [str(value).strip()]
    if messages is not None:
        parts = texts_of(messages)
    if all(any(part in text for text in read) for part in parts):
        return True
    # A column such as `text` often repeats the prompt and the response in one text.
    return isinstance(value, str) and bool(read) and all(text in value for text in read)


def texts_of(*values: Any) -> list[str]:
    """Return the stripped texts of prompts and responses, without blank ones. Messages give their contents."""
    parts: list[str] = []
    for value in values:
        if isinstance(value, list):
            parts += [str(message["content"] or "") for message in value]
        else:
            parts.append(str(value))
    return [part.strip() for part in parts if not is_blank(part)]


def column_note(used: Iterable[str], records: Iterable[Mapping[str, Any]], rest: str = "not used") -> str:
    """Return one line with the columns that are used, and all other columns of the rows under the heading `rest`."""
    # dict.fromkeys removes duplicates and keeps the order, unlike a set.
    used = list(dict.fromkeys(used))
    is_empty: dict[str, bool] = {}
    for record in records:
        for name, value in record.items():
            is_empty[str(name)] = is_empty.get(str(name), True) and is_blank(value)
    others = [name for name in is_empty if name not in used]
    shown = [f"{name} (empty)" if is_empty[name] else name for name in others]
    return f"columns used: {', '.join(used) or 'none'}; {rest}: {', '.join(shown) or 'none'}"


def likely_keys(record: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the columns that probably hold the prompt and the label of a row (or None), for error messages."""
    prompts = filled(record, (*PROMPTS, *CONVERSATIONS))
    # A column such as `answer` may be a prompt or a label, but not both.
    labels = [name for name in LABELS if name not in prompts[:1] and _has(record, name)]
    return (prompts or [None])[0], (labels or [None])[0]


def _has(record: Mapping[str, Any], name: str) -> bool:
    column, _, field = name.partition(".")
    inner = record.get(column)
    return column in record and (not field or (isinstance(inner, Mapping) and field in inner))
