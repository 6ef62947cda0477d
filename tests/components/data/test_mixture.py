"""Combination of several sources: concatenated or interleaved."""

from collections import Counter

import pytest

from components.data.mixture import mixed, mixture_probabilities, source_names
from tests.messages import says


def test_without_probabilities_the_parts_are_concatenated() -> None:
    assert mixed([["a", "b"], ["c"]], mixture_probabilities(None, 2), seed=1) == ["a", "b", "c"]


def test_rows_of_a_small_part_repeat_until_the_large_part_is_used_up() -> None:
    small = ["s"]
    large = [f"l{i}" for i in range(300)]
    actual = mixed([small, large], mixture_probabilities("0.25,0.75", 2), seed=1)
    counts = Counter(actual)
    assert {row: counts[row] for row in large} == dict.fromkeys(large, 1)
    # Among 300 samples of the large part there are about 100 of the small one, with a standard deviation of 11.5.
    assert abs(counts["s"] - 100) < 50
    assert actual == mixed([small, large], [0.25, 0.75], seed=1)
    assert actual != mixed([small, large], [0.25, 0.75], seed=2)


def test_parts_of_a_source_are_separated_by_commas_and_not_empty() -> None:
    assert source_names("a.jsonl, task:sort") == ["a.jsonl", "task:sort"]
    with pytest.raises(ValueError, match=says("a.jsonl,", "empty")):
        source_names("a.jsonl,")
    with pytest.raises(ValueError, match=says("probs='0.5,0.6'", "2 parts")):
        mixture_probabilities("0.5,0.6", 2)
