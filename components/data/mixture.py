"""Several sources of data as one: end to end, or drawn with a probability for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")
Note = Callable[[str], None]
"""Takes a sentence that the user reads before the run starts."""


def source_names(source: str) -> list[str]:
    """The parts of a source, which have commas between them.

    Raises:
        ValueError: one is empty.
    """
    names = [name.strip() for name in source.split(",")]
    if not all(names):
        raise ValueError(f"the data source {source!r} has an empty part; write names with one comma between two")
    return names


def mixture_probabilities(probs: str | None, count: int) -> list[float] | None:
    """With which probability the next row comes from which part; None where parts are laid end to end.

    Args:
        probs: a positive number for each, with commas between them, 1 in all.
        count: of the parts.

    Raises:
        ValueError: they are no such numbers.
    """
    if probs is None:
        return None
    try:
        values = [float(value) for value in probs.split(",")]
    except ValueError as error:
        raise ValueError(f"probs={probs!r} must be numbers with commas between them ({error})") from error
    if len(values) != count or not all(value > 0 for value in values) or not abs(math.fsum(values) - 1) <= 1e-6:
        raise ValueError(
            f"probs={probs!r} must be one positive number for each of the {count} parts of the data, and 1 in all; "
            f"found {len(values)}, {math.fsum(values):g} in all"
        )
    return values


def mixed(parts: Sequence[Sequence[T]], probabilities: Sequence[float] | None, seed: int) -> list[T]:
    """The rows of all parts. Drawn rows continue until every row of every part was used, so those of small parts come
    more than once.

    Args:
        parts: each with its rows.
        probabilities: as `mixture_probabilities` gives them.
        seed: of the drawing.
    """
    rows = [row for part in parts for row in part]
    if probabilities is None:
        return rows
    return [rows[i] for i in _interleave([len(part) for part in parts], probabilities, seed)]


def first_rows(rows: list[T], most: int | None, source: str, note: Note | None) -> list[T]:
    """Return the first `most` rows of a source (None: all), and report how many are left out."""
    if most is None or len(rows) <= most:
        return rows
    if note is not None:
        note(f"{most:,} of {len(rows):,} rows of {source} are used, {len(rows) - most:,} are left out")
    return rows[:most]


def _interleave(lengths: list[int], probabilities: Sequence[float], seed: int) -> list[int]:
    """Give the order of a blend, as indices into the parts laid end to end."""
    # Only indices go through the library: values would come back with the types of its tables.
    import datasets

    ends = np.cumsum(lengths)
    parts = [datasets.Dataset.from_dict({"i": range(end - n, end)}) for end, n in zip(ends.tolist(), lengths)]
    total = math.fsum(probabilities)
    blend = datasets.interleave_datasets(
        parts, probabilities=[p / total for p in probabilities], seed=seed, stopping_strategy="all_exhausted"
    )
    return blend[:]["i"]
