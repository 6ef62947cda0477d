"""The measurement of this machine."""

from pathlib import Path

import pytest

from plugins.machine_speed.engines import measure_engines
from plugins.machine_speed.layers import DECODE, FORWARD, TRAIN
from plugins.machine_speed.measure import loopback_rate, product_rate, read_rate, write_rate


def test_rates_of_this_machine_are_plausible(tmp_path: Path) -> None:
    assert 1e8 < product_rate("cpu", "float32") < 1e14
    assert 1e8 < read_rate("cpu", 2**21) < 1e13
    assert write_rate(tmp_path) > 1e5
    assert loopback_rate() > 1e6


@pytest.mark.full
@pytest.mark.nightly
def test_engines_take_longer_for_more_tokens_and_training_longer_than_log_probabilities() -> None:
    speed = measure_engines()
    shape = {"parameters": 500_000, "layers": 4, "logits": 0.0}
    for kind in (FORWARD, TRAIN, DECODE):
        assert speed.passes[kind].seconds(tokens=2048, **shape) > 2 * speed.passes[kind].seconds(tokens=64, **shape)
    assert speed.passes[TRAIN].seconds(tokens=1024, **shape) > 1.5 * speed.passes[FORWARD].seconds(tokens=1024, **shape)
