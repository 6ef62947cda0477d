"""Cells of rows as the text, chat messages, label or number that an option reads from them.

Rows come from JSON, from text (CSV), and from files with types (Parquet, Arrow). The same data means the same in each:
a null is an absent column, and responses are compared with a label as it was written.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any


class SpelledFloat(float):
    """A number of a JSON file that keeps its spelling, such as 0.50, beside its value."""

    spelling: str


def kind_of(value: Any) -> str:
    """Describe a value of the wrong kind for an error message."""
    if isinstance(value, (list, dict, str)):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__} ({value!r:.80})"


def without_surrogates(value: Any) -> Any:
    """Replace halves of surrogate pairs, which no tokenizer takes, by question marks in all texts of a value.

    JSON and Python can hold them, so what a program returns may.
    """
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {without_surrogates(name): without_surrogates(item) for name, item in value.items()}
    return [without_surrogates(item) for item in value] if isinstance(value, list) else value


def without_nulls(value: Any) -> Any:
    """Drop the null fields of objects, at any depth; nulls that are items of lists keep their place."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def cell_at(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or with dots that of a field of a column; None if there is none."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def keep_spelling(records: Any, key: str, reparse: Callable[[], Any]) -> None:
    """Replace the labels that are floats, in place, where their text in the file was another than Python's.

    Args:
        records: rows of a JSON file; anything but a list of objects is left alone.
        key: column of the label, see `cell_at`.
        reparse: returns the same rows with all floats as text. It is called only if it is needed.
    """
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        return
    numbers = [number for number, record in enumerate(records) if type(cell_at(record, key)) is float]
    spelled = reparse() if numbers else []
    for number in numbers:
        label, spelling = cell_at(records[number], key), cell_at(spelled[number], key)
        if not isinstance(spelling, str) or spelling == repr(label):
            continue
        parent, name = records[number], key
        while name not in parent:
            first, _, name = name.partition(".")
            parent = parent[first]
        parent[name] = SpelledFloat(label)
        parent[name].spelling = spelling


def text_or_messages(value: Any, where: str, mend: str) -> str | list[dict[str, Any]]:
    """Return a cell that a model reads: text, or chat messages whose contents are text.

    A list of text parts as the content of a message is joined, and null fields of a message are dropped. The content
    may be null only beside the tool calls of an assistant.

    Args:
        value: of the cell.
        where: names the file, the row and the column in errors.
        mend: ends errors: what to set, or to write instead.

    Raises:
        ValueError: it is something else, or has parts that are no text.
    """
    if isinstance(value, str):
        return value
    if value is None:
        raise ValueError(
            f"{where} is null or absent, expected a string or a list of {{role, content}} messages; take the row out, "
            f"or {mend}"
        )
    if (
        not isinstance(value, Sequence)
        or not value
        or not all(isinstance(item, Mapping) and "role" in item for item in value)
    ):
        raise ValueError(
            f"{where}: expected a string or a list of {{role, content}} messages, found {kind_of(value)}; {mend}"
        )
    try:
        return [text_message(item, f"message {number}") for number, item in enumerate(value)]
    except ValueError as error:
        raise ValueError(f"{where}, {error}; {mend}") from error


def text_message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a chat message whose content is text, of which text parts are joined; null fields are dropped.

    Args:
        item: the message.
        where: names it in errors.

    Raises:
        ValueError: its content is something else, or null where the message calls no tools.
    """
    message = {name: field for name, field in item.items() if field is not None}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ValueError(f"{where}: its role must be text, such as user, found {kind_of(role)}")
    if content is None or content == []:
        if role != "assistant" or not (message.get("tool_calls") or message.get("function_call")):
            raise ValueError(
                f"{where}: its role is {role!r}, and its content is null or absent; only an assistant's with "
                "tool_calls may be"
            )
        return {**message, "content": None}
    if isinstance(content, list):
        return {**message, "content": "".join(_part(part, where) for part in content)}
    if not isinstance(content, str):
        raise ValueError(f"{where}: its content must be text or a list of text parts, found {kind_of(content)}")
    return message


def _part(part: Any, where: str) -> str:
    fields = without_nulls(part) if isinstance(part, dict) else {}
    kind = fields.get("type", "text")
    if kind != "text":
        raise ValueError(f"{where}: its content has a part of type {kind!r}; only text parts can be read")
    if not isinstance(fields.get("text"), str):
        raise ValueError(f'{where}: its content has the part {part!r:.80}; write {{"type": "text", "text": ...}}')
    return fields["text"]


def label_of(value: Any, where: str, option: str) -> Any:
    """Return a label: text, a number, a Boolean, a list or an object; decimals and dates as text.

    Raises:
        ValueError: it is null, not finite, or has no text.
    """
    if isinstance(value, (str, bool, int, list, dict)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (datetime.date, datetime.time)) or (isinstance(value, Decimal) and value.is_finite()):
        return label_text(value)
    if value is None:
        raise ValueError(f"{where} is null or absent; take the row out, or set {option} to a column that every row has")
    raise ValueError(f"{where}: a label is text, a finite number, a list or an object, found {kind_of(value)}")


def label_text(label: Any) -> str:
    """Return a label as what responses are compared with.

    A number of a JSON file is written as it was there, a number of a typed file as Python writes it, a decimal with its
    digits, a Boolean as true or false, a date as ISO 8601.
    """
    if isinstance(label, bool):
        return "true" if label else "false"
    if isinstance(label, SpelledFloat):
        return label.spelling
    return label.isoformat() if isinstance(label, (datetime.date, datetime.time)) else str(label)


def number_of(value: Any, where: str) -> float:
    """Return a cell as a number; in a CSV file it is text.

    Raises:
        ValueError: it is no finite number.
    """
    number = math.nan
    if isinstance(value, (int, float, Decimal, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where} holds {value!r:.80}; give a finite number")
    return number


def check_one_kind(prompts: Iterable[Any], source: str) -> None:
    """Refuse text in some rows and chat messages in others.

    A reward function is called with a whole batch: it would get texts for prompts that are messages.

    Args:
        prompts: of all rows, in order; None where a row has none.
        source: names where they are from.
    """
    first: dict[bool, int] = {}
    for number, prompt in enumerate(prompts):
        if prompt is not None:
            first.setdefault(isinstance(prompt, str), number)
        if len(first) > 1:
            raise ValueError(
                f"{source}: row {first[True]} has text and row {first[False]} has chat messages; write all rows as "
                "one of the two"
            )
