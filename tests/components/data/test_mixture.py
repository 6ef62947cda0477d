"""Combination of several sources: names, and concatenation."""

import pytest

from components.data.mixture import mixer, source_names
from tests.messages import says


def test_without_probabilities_the_parts_are_concatenated() -> None:
    assert mixer(None, 2)([["a", "b"], ["c"]], 1) == ["a", "b", "c"]


def test_parts_of_a_source_are_separated_by_commas_and_not_empty() -> None:
    assert source_names("a.jsonl, task:sort") == ["a.jsonl", "task:sort"]
    with pytest.raises(ValueError, match=says("a.jsonl,", "empty")):
        source_names("a.jsonl,")
