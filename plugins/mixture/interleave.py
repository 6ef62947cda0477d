"""Rows of several data sources, drawn with a probability for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def mixer(probs: str, count: int) -> Callable[[Sequence[Sequence[T]], int], list[T]]:
    """Return the function (rows of each source, seed) -> rows of `components.data.mixture.mixer`.

    Rows are drawn until every row of every source was used. Rows of small sources then occur more than once.

    Raises:
        ValueError: see `mixture_probabilities`.
    """
    probabilities = mixture_probabilities(probs, count)

    def mixed(parts: Sequence[Sequence[T]], seed: int) -> list[T]:
        rows = [row for part in parts for row in part]
        return [rows[i] for i in _interleave([len(part) for part in parts], probabilities, seed)]

    return mixed


def mixture_probabilities(probs: str, count: int) -> list[float]:
    """Parse the probability of each source for the next row.

    Args:
        probs: comma-separated positive numbers that sum to 1, one for each source.
        count: number of sources.

    Raises:
        ValueError: the numbers are not positive, do not sum to 1, or are more or fewer than `count`.
    """
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
