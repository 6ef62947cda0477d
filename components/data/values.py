"""Text of single values: labels as responses are compared with them, and values of a wrong kind in error messages."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any


class SpelledFloat(float):
    """A number of a JSON file that keeps its text, such as 0.50, in addition to its value."""

    spelling: str
    """Text of the number in the file."""


def kind_of(value: Any) -> str:
    """Describe a value of the wrong kind for an error message."""
    if isinstance(value, (list, dict, str)):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__} ({value!r:.80})"


def label_text(label: Any) -> str:
    """Return a label as the text that responses are compared with.

    A number of a JSON file keeps the text of the file. A number of a typed file is formatted as in Python, a decimal
    with all its digits, a Boolean as true or false, and a date in ISO 8601.
    """
    # As in JSON, because models write true and not True.
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, SpelledFloat):
        return label.spelling
    if isinstance(label, (datetime.date, datetime.time)):
        return label.isoformat()
    return str(label)


def check_one_kind(prompts: Iterable[Any], source: str) -> None:
    """Raise a ValueError if some rows hold text and others chat messages.

    A reward function is called with a complete batch, in which prompts must be of one kind.

    Args:
        prompts: prompts of all rows, in order; None for a row without one.
        source: file or column of the prompts, for the error message.
    """
    first: dict[bool, int] = {}
    for number, prompt in enumerate(prompts):
        if prompt is not None:
            first.setdefault(isinstance(prompt, str), number)
        # The first row of each kind is enough for the error, so the rest of a large file is not read.
        if len(first) > 1:
            raise ValueError(
                f"{source}: row {first[True]} has text and row {first[False]} has chat messages; write all rows as "
                "one of the two"
            )
