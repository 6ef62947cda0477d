"""Times of the parts of generation, on a fake clock."""

import time

import pytest

from components.generate.config import EVALUATION_STEP, SamplingConfig
from components.generate.times import GenerationTimes


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def waited(now: list[float], seconds: float) -> bool:
    now[0] += seconds
    return True


def test_the_parts_of_a_generation_add_up_to_its_time(advance: list[float]) -> None:
    times = GenerationTimes()
    with times.generation(SamplingConfig()):
        advance[0] += 1
        with times.measure("decode"):
            advance[0] += 2
            with times.measure("prefill"):
                advance[0] += 4
            advance[0] += 8
        assert times.timed(lambda: waited(advance, 16), bool)()
        assert times.timed(lambda: waited(advance, 0.5), lambda _: False)()
        advance[0] += 32
    advance[0] += 64  # outside of a generation
    expected = {"prefill": 20.0, "decode": 10.5, "objects": 33.0}
    assert times.take() == {f"timing_s/generate_{part}": seconds for part, seconds in expected.items()}
    assert set(times.take().values()) == {0.0}


def test_evaluations_and_work_outside_of_a_generation_are_not_measured(advance: list[float]) -> None:
    times = GenerationTimes()
    with times.generation(SamplingConfig(step=EVALUATION_STEP)), times.measure("decode"):
        advance[0] += 1
        times.timed(lambda: waited(advance, 1), bool)()
    with times.measure("decode"):
        advance[0] += 1
    assert set(times.take().values()) == {0.0}


def test_a_generation_that_fails_is_closed(advance: list[float]) -> None:
    times = GenerationTimes()
    with pytest.raises(RuntimeError), times.generation(SamplingConfig()), times.measure("decode"):
        advance[0] += 3
        raise RuntimeError
    advance[0] += 5
    with times.measure("decode"):
        advance[0] += 7
    assert times.take()["timing_s/generate_decode"] == 3
