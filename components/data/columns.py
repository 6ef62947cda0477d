"""Columns of data by their meaning: one whose name has a well-known meaning is used, or its row is refused.

The model reads what is named here. All other columns are left to reward functions and agents, and in supervised
recipes they are listed as not used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.data.messages import parse_tools, read_messages

CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns with whole conversations."""
PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input")
"""Columns with prompts, the likeliest first."""
RESPONSES = ("response", "completion", "output", "answer", "solution")
"""Columns with responses, the likeliest first."""
LABELS = ("label", "answer", "solution", "ground_truth", "target", "reward_model.ground_truth")
"""Columns with what a reward compares with; a dot is a field of a field."""
PREFERENCES = ("chosen", "rejected")
SYSTEMS = ("system", "system_prompt")
TOOLS = "tools"
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Columns with inputs that are no text."""
COMPANIONS = ("input", "context")
"""Columns that belong to an `instruction`."""
WITHOUT_A_PLACE = {
    "history": "earlier turns; write the whole conversation as chat messages",
    "functions": "definitions of functions; give them as a column 'tools'",
    "documents": "documents for the chat template; write them into the prompt",
    "chat_template_kwargs": "arguments of the chat template; set model.chat_template to one with these values",
}
"""Columns that change what a model reads elsewhere and have no place here, with the remedy."""


@dataclass(frozen=True)
class Prompt:
    """The prompt of a row, and the columns that it was read from."""

    value: Any
    """Text, chat messages, or whatever else the column holds."""
    columns: tuple[str, ...]


def column_names(option: str | None) -> tuple[str, ...]:
    """Split the names of columns of an option, with commas between."""
    return tuple(name.strip() for name in (option or "").split(",") if name.strip())


def is_blank(value: object) -> bool:
    """Return True for None, for empty lists and objects, and for text of nothing but spaces."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, Sequence | Mapping) and not value)


def filled(record: Mapping[str, Any], names: Iterable[str], ignored: Collection[str] = ()) -> list[str]:
    """Return the columns among `names` that hold something and are not to be ignored."""
    return [name for name in names if name not in ignored and not is_blank(record.get(name))]


def read_prompt(record: Mapping[str, Any], key: str, ignored: Collection[str] = ()) -> Prompt:
    """Read a column with a prompt: text, or chat messages in one of the forms of `read_messages`.

    An `instruction` is followed by a blank line and the text of its `input` or `context`, unless that is empty.
    """
    value = record[key]
    companions = filled(record, COMPANIONS, ignored) if key == "instruction" and isinstance(value, str) else []
    if not companions:
        messages = read_messages(value)
        return Prompt(value if messages is None else messages, (key,))
    parts = [record[name] for name in companions]
    if len(parts) > 1 or not isinstance(parts[0], str):
        raise ValueError(
            f"columns {', '.join(map(repr, companions))} beside 'instruction' must be one column of text; name what is "
            f"not to be read in data.ignored_columns={','.join(companions)}"
        )
    return Prompt("\n\n".join([value, *parts]) if value.strip() else parts[0], (key, *companions))


def read_system(record: Mapping[str, Any], ignored: Collection[str] = ()) -> tuple[str | None, list[str]]:
    """Read the system prompt of a row, and the columns that hold it.

    Raises:
        ValueError: it is no text, or there are two.
    """
    names = filled(record, SYSTEMS, ignored)
    for name in names:
        if not isinstance(record[name], str) or record[name] != record[names[0]]:
            raise ValueError(
                f"column {name!r} must hold one system prompt as text, found {record[name]!r:.80}; mend it, or set "
                f"data.ignored_columns={name}"
            )
    return (record[names[0]] if names else None), names


def read_tools(record: Mapping[str, Any], ignored: Collection[str] = ()) -> list[dict[str, Any]]:
    """Read the definitions of tools of a row; none where the column is missing or empty."""
    return parse_tools(record[TOOLS]) if filled(record, [TOOLS], ignored) else []


def needs_template(name: str, value: Any) -> ValueError:
    """Return the error for a column that only a chat template has a place for."""
    return ValueError(
        f"column {name!r} holds {value!r:.80}, which only a chat template can write, and prompts are read as plain "
        f"text; set data.apply_chat_template=true, or data.ignored_columns={name} to leave it out"
    )


def refuse_without_a_place(record: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """Refuse columns that a model reads elsewhere and that have no place here.

    Raises:
        ValueError: there is one; the message has the remedy.
    """
    if media := filled(record, MEDIA, ignored):
        raise ValueError(
            f"it has {', '.join(media)}, which the policy would not see; only text is supported: remove it, or set "
            f"data.ignored_columns={','.join(media)} to train without"
        )
    for name in filled(record, WITHOUT_A_PLACE, ignored):
        raise ValueError(
            f"column {name!r} holds {WITHOUT_A_PLACE[name]}, or set data.ignored_columns={name} to leave it out"
        )


def refuse_weight(record: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """Refuse a weight of a whole row, other than 1: all rows weigh the same."""
    for name in filled(record, ("weight", "sample_weight"), ignored):
        if record[name] != 1:
            raise ValueError(
                f"column {name!r} is {record[name]!r}, and all rows weigh the same; leave rows out instead (a message "
                f"with 'weight': 0 is not learnt), or set data.ignored_columns={name}"
            )


def refuse_unread(
    record: Mapping[str, Any], names: Iterable[str], read: Sequence[str], ignored: Collection[str], remedy: str
) -> None:
    """Refuse columns of a known meaning whose content is not in `read`, the texts that the model reads.

    Args:
        record: the row.
        names: of the columns that are not read.
        read: all texts that the model reads of the row.
        ignored: columns that the user leaves out.
        remedy: an option that chooses the columns, for the message.

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
    """Return True where the model reads all of a value from other columns, or these are all part of it."""
    messages = read_messages(value)
    parts = texts_of(messages) if messages is not None else [str(value).strip()]
    if all(any(part in text for text in read) for part in parts):
        return True
    return isinstance(value, str) and bool(read) and all(text in value for text in read)


def texts_of(*values: Any) -> list[str]:
    """Return the texts of prompts and responses, of messages their contents, for a look at what is read."""
    parts: list[str] = []
    for value in values:
        parts += [str(part["content"] or "") for part in value] if isinstance(value, list) else [str(value)]
    return [part.strip() for part in parts if not is_blank(part)]


def column_note(used: Iterable[str], records: Iterable[Mapping[str, Any]], rest: str = "not used") -> str:
    """Return a line with the columns that were used, and all others of the rows."""
    used = list(dict.fromkeys(used))
    is_empty: dict[str, bool] = {}
    for record in records:
        for name, value in record.items():
            is_empty[str(name)] = is_empty.get(str(name), True) and is_blank(value)
    others = [f"{name} (empty)" if empty else name for name, empty in is_empty.items() if name not in used]
    return f"columns used: {', '.join(used) or 'none'}; {rest}: {', '.join(others) or 'none'}"


def likely_keys(record: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the columns of a row that are likely its prompt and its label, for messages."""
    prompts = filled(record, (*PROMPTS, *CONVERSATIONS))
    labels = [name for name in LABELS if name not in prompts[:1] and _has(record, name)]
    return (prompts or [None])[0], (labels or [None])[0]


def _has(record: Mapping[str, Any], name: str) -> bool:
    column, _, field = name.partition(".")
    inner = record.get(column)
    return column in record and (not field or (isinstance(inner, Mapping) and field in inner))
