"""Values formatted for readers."""

import pytest

from training.tracking.serialization import duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3725, "1 h 02 min"),
        (273600, "3 d 04 h"),
    ],
)
def test_a_duration_is_printed_in_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words
