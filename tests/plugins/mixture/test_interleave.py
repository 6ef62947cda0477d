"""Rows of several sources, interleaved with a probability for each."""

from collections import Counter

import pytest

from components.data.mixture import mixer
from tests.messages import says


def test_rows_of_a_small_part_repeat_until_the_large_part_is_used_up() -> None:
    small = ["s"]
    large = [f"l{i}" for i in range(300)]
    mixed = mixer("0.25,0.75", 2)
    actual = mixed([small, large], 1)
    counts = Counter(actual)
    assert {row: counts[row] for row in large} == dict.fromkeys(large, 1)
    # Among 300 samples of the large part there are about 100 of the small one, with a standard deviation of 11.5.
    assert abs(counts["s"] - 100) < 50
    assert actual == mixed([small, large], 1)
    assert actual != mixed([small, large], 2)


def test_probabilities_that_do_not_sum_to_one_are_refused() -> None:
    with pytest.raises(ValueError, match=says("probs='0.5,0.6'", "2 parts")):
        mixer("0.5,0.6", 2)
