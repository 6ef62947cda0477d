"""Interpolation between measured passes."""

import pytest

from plugins.machine_speed.layers import Passes, Point, interpolated

PASSES = Passes(
    points=[
        Point(parameters=parameters, tokens=tokens, layer_s=1e-3 + parameters * tokens / 1e9, rest_s=2e-3)
        for parameters in (10_000, 1_000_000)
        for tokens in (32, 512)
    ],
    logit_s=1e-9,
)


def test_seconds_at_a_measured_size_are_those_that_were_measured() -> None:
    seconds = PASSES.seconds(parameters=1_000_000, layers=4, tokens=512, logits=10**6)
    assert seconds == pytest.approx(4 * (1e-3 + 0.512) + 2e-3 + 1e-3)


def test_seconds_grow_with_tokens_and_width_between_measured_sizes() -> None:
    sizes = [(50_000, 100), (100_000, 100), (100_000, 300), (400_000, 400)]
    seconds = [PASSES.seconds(parameters=p, layers=1, tokens=t, logits=0) for p, t in sizes]
    assert seconds == sorted(seconds)


def test_below_the_measured_sizes_seconds_are_overhead_and_above_they_are_proportional() -> None:
    known = [(10.0, 2.0), (100.0, 5.0)]
    assert interpolated(known, 1) == 2.0
    assert interpolated(known, 1000) == pytest.approx(50.0)
    assert interpolated(known, 10**1.5) == pytest.approx(10**0.5)
