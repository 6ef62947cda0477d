"""Conversion of the cells of rows to text, chat messages, labels and numbers.

Rows come from JSON, from text (CSV), and from typed files (Parquet, Arrow). The same data gives the same result in
every format: a null is an absent column, and a label is compared as it was written in the file.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from components.data.values import SpelledFloat, kind_of, label_text


def without_surrogates(value: Any) -> Any:
    """Replace lone surrogates by question marks in all texts of a value.

    JSON and Python strings may contain them, so the output of a program may too, but no tokenizer accepts them.
    """
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {without_surrogates(name): without_surrogates(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    return value


def without_nulls(value: Any) -> Any:
    """Drop the null fields of objects at any depth. Nulls that are items of lists stay."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def cell_at(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a nested field if the key has dots. None if it does not exist."""
    # A column whose own name has dots takes precedence over a nested field.
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def keep_spelling(records: Any, key: str, reparse: Callable[[], Any]) -> None:
    """Replace float labels in place by a `SpelledFloat` where their text in the file differs from Python's.

    Args:
        records: rows of a JSON file. Anything but a list of objects is left unchanged.
        key: column of the label, see `cell_at`.
        reparse: returns the same rows with all floats as text. It is called only if a label is a float.
    """
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        return
    numbers = [number for number, record in enumerate(records) if type(cell_at(record, key)) is float]
    if not numbers:
        return
    text_records = reparse()
    for number in numbers:
        label = cell_at(records[number], key)
        spelling = cell_at(text_records[number], key)
        if not isinstance(spelling, str) or spelling == repr(label):
            continue
        # Walk to the object that holds the label. The name of a column may contain dots itself.
        parent = records[number]
        name = key
        while name not in parent:
            first, _, name = name.partition(".")
            parent = parent[first]
        parent[name] = SpelledFloat(label)
        parent[name].spelling = spelling


def text_or_messages(value: Any, where: str, mend: str) -> str | list[dict[str, Any]]:
    """Check a cell that a model reads, and return it: text, or chat messages whose contents are text.

    If the content of a message is a list of text parts, they are joined. Null fields of a message are dropped. The
    content may be null only in an assistant's message with tool calls.

    Args:
        value: value of the cell.
        where: file, row and column, for error messages.
        mend: remedy for error messages: what to set, or what to write instead.

    Raises:
        ValueError: the cell holds something else, or has parts that are not text.
    """
    if isinstance(value, str):
        return value
    if value is None:
        raise ValueError(
            f"{where} is null or absent, expected a string or a list of {{role, content}} messages; remove the row, "
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
    """Return a chat message whose content is text. Text parts are joined, and null fields are dropped.

    Args:
        item: the message.
        where: location of the message, for error messages.

    Raises:
        ValueError: its content is something else, or is null although the message calls no tools.
    """
    message = {name: field for name, field in item.items() if field is not None}
    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str):
        raise ValueError(f"{where}: its role must be text, such as user, found {kind_of(role)}")
    # Some data sets write an empty list of parts for no content.
    if content is None or content == []:
        if role != "assistant" or not (message.get("tool_calls") or message.get("function_call")):
            raise ValueError(
                f"{where}: its role is {role!r}, and its content is null or absent; only an assistant's message with "
                "tool_calls may have no content"
            )
        return {**message, "content": None}
    if isinstance(content, list):
        return {**message, "content": "".join(_part(part, where) for part in content)}
    if not isinstance(content, str):
        raise ValueError(f"{where}: its content must be text or a list of text parts, found {kind_of(content)}")
    return message


def _part(part: Any, where: str) -> str:
    fields: dict[str, Any] = {}
    if isinstance(part, dict):
        fields = without_nulls(part)
    kind = fields.get("type", "text")
    if kind != "text":
        raise ValueError(f"{where}: its content has a part of type {kind!r}; only text parts can be read")
    if not isinstance(fields.get("text"), str):
        raise ValueError(f'{where}: its content has the part {part!r:.80}; write {{"type": "text", "text": ...}}')
    return fields["text"]


def label_of(value: Any, where: str, option: str) -> Any:
    """Check a label and return it: text, a number, a Boolean, a list or an object. Decimals and dates become text.

    Raises:
        ValueError: the label is null, not finite, or of another type.
    """
    if isinstance(value, (str, bool, int, list, dict)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (datetime.date, datetime.time)) or (isinstance(value, Decimal) and value.is_finite()):
        return label_text(value)
    if value is None:
        raise ValueError(f"{where} is null or absent; remove the row, or set {option} to a column that every row has")
    raise ValueError(f"{where}: a label is text, a finite number, a list or an object, found {kind_of(value)}")


def number_of(value: Any, where: str) -> float:
    """Return a cell as a number. In a CSV file the cell is text.

    Raises:
        ValueError: the cell is not a finite number.
    """
    number = math.nan
    # bool is a subclass of int, but True is not meant as the number 1.
    if isinstance(value, (int, float, Decimal, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where} holds {value!r:.80}; give a finite number")
    return number
