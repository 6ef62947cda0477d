"""Numbers of ranks as text."""

from __future__ import annotations

from collections.abc import Sequence


def ranges(numbers: Sequence[int]) -> str:
    """Write numbers as ranges: 0, 1, 2, 3 and 6 as `0-3,6`."""
    intervals: list[list[int]] = []
    for number in sorted(numbers):
        if intervals and intervals[-1][-1] == number - 1:
            intervals[-1][1:] = [number]
        else:
            intervals.append([number])
    # An interval has one end or two.
    return ",".join("-".join(map(str, ends)) for ends in intervals)
