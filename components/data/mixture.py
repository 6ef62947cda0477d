"""Combination of several data sources: concatenated, or drawn by the plug-in `mixture` with a probability for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from components.registry import load

T = TypeVar("T")
Note = Callable[[str], None]
"""Callback for a sentence that is shown to the user before the run starts."""


def source_names(source: str) -> list[str]:
    """Split a comma-separated list of data sources.

    Raises:
        ValueError: a name is empty.
    """
    names = [name.strip() for name in source.split(",")]
    if not all(names):
        raise ValueError(f"the data source {source!r} has an empty part; write names with one comma between two")
    return names


def mixer(probs: str | None, count: int) -> Callable[[Sequence[Sequence[T]], int], list[T]]:
    """Return the function (rows of each source, seed) -> rows that combines `count` sources.

    Args:
        probs: comma-separated probability of each source for the next row. None concatenates the sources.
        count: number of sources.

    Raises:
        MissingPlugin: `probs` is set, and no plug-in draws rows by probabilities.
        ValueError: the probabilities are invalid.
    """
    if probs is None:
        return lambda parts, _: [row for part in parts for row in part]
    return load("data mixture", "probabilities", f"probs={probs}")(probs, count)


def first_rows(rows: list[T], most: int | None, source: str, note: Note | None) -> list[T]:
    """Return the first `most` rows of a source (None: all rows), and report the number of rows left out to `note`."""
    if most is None or len(rows) <= most:
        return rows
    if note is not None:
        note(f"{most:,} of {len(rows):,} rows of {source} are used, {len(rows) - most:,} are left out")
    return rows[:most]
