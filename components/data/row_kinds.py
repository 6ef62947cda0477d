"""Kinds of rows, so that the trials before a run call rewards and agents with a row of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.data.messages import are_messages

SEARCHED_ROWS = 10_000
"""Number of rows that are searched for the rows of a trial."""
MOST_KINDS = 8
"""Maximum number of kinds of rows that are tried."""
ROWS_OF_A_KIND = 3
"""Maximum number of rows of a kind that `rows_by_kind` returns."""


def rows_by_kind(rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the numbers of the first rows of each kind, ROWS_OF_A_KIND at most: a kind is text or messages, with a
    source and names of columns.
    """
    kinds: dict[Any, list[int]] = {}
    for number, row in enumerate(rows[:SEARCHED_ROWS]):
        columns = row.get("extra_info")
        names = None
        if isinstance(columns, Mapping):
            names = frozenset(columns)
        kind = are_messages(row["input"]), row["datasource"], names
        if kind not in kinds and len(kinds) == MOST_KINDS:
            continue
        numbers = kinds.setdefault(kind, [])
        if len(numbers) < ROWS_OF_A_KIND:
            numbers.append(number)
    return list(kinds.values())
