"""Combination of several data sources: concatenated, or interleaved with a probability for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

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


def mixture_probabilities(probs: str | None, count: int) -> list[float] | None:
    """Parse the probability of each source for the next row. None means that sources are concatenated.

    Args:
        probs: comma-separated positive numbers that sum to 1, one for each source.
        count: number of sources.

    Raises:
        ValueError: the numbers are not positive, do not sum to 1, or are more or fewer than `count`.
    """
    if probs is None:
        return None
    try:
        values = [float(value) for value in probs.split(",")]
    except ValueError as error:
        raise ValueError(f"probs={probs!r} must be numbers with commas between them ({error})") from error
    # `not <=` instead of `>`, so that NaN is rejected too.
    if len(values) != count or not all(value > 0 for value in values) or not abs(math.fsum(values) - 1) <= 1e-6:
        raise ValueError(
            f"probs={probs!r} must be one positive number for each of the {count} parts of the data, with a sum of 1; "
            f"found {len(values)} with a sum of {math.fsum(values):g}"
        )
    return values


def mixed(parts: Sequence[Sequence[T]], probabilities: Sequence[float] | None, seed: int) -> list[T]:
    """Combine the rows of several sources.

    With probabilities, rows are drawn until every row of every source was used. Rows of small sources then occur more
    than once.

    Args:
        parts: rows of each source.
        probabilities: result of `mixture_probabilities`. None concatenates the sources.
        seed: seed of the random order.
    """
    rows = [row for part in parts for row in part]
    if probabilities is None:
        return rows
    return [rows[i] for i in _interleave([len(part) for part in parts], probabilities, seed)]


def first_rows(rows: list[T], most: int | None, source: str, note: Note | None) -> list[T]:
    """Return the first `most` rows of a source (None: all rows), and report the number of rows left out to `note`."""
    if most is None or len(rows) <= most:
        return rows
    if note is not None:
        note(f"{most:,} of {len(rows):,} rows of {source} are used, {len(rows) - most:,} are left out")
    return rows[:most]


def _interleave(lengths: list[int], probabilities: Sequence[float], seed: int) -> list[int]:
    """Return the order of interleaved rows, as indices into the concatenated sources."""
    # Only indices go through `datasets`: rows would come back with the types of its tables.
    import datasets

    ends = np.cumsum(lengths)
    parts = [datasets.Dataset.from_dict({"i": range(end - n, end)}) for end, n in zip(ends.tolist(), lengths)]
    # The sum may differ from 1 by rounding, which numpy would reject.
    total = math.fsum(probabilities)
    blend = datasets.interleave_datasets(
        parts, probabilities=[p / total for p in probabilities], seed=seed, stopping_strategy="all_exhausted"
    )
    return blend[:]["i"]
