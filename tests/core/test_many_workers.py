"""What the driver does for one worker does not depend on how many there are: its CPU time, with simulated workers."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FEW, MANY = 100, 1600
MOST_GROWTH = 2.0
"""Of the CPU time for each worker. It is about 1; what is quadratic, and takes a fourteenth of all else with a hundred
workers, makes it 2."""
APART_S = 0.0003
"""Longer for a hundred answers than a wait takes at once."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark whose workers these are."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    yield importlib.import_module("bench_core")


@pytest.mark.parametrize("apart_s", [0.0, APART_S], ids=["answers-at-once", "answers-one-by-one"])
def test_the_drivers_work_for_each_worker_does_not_grow_with_their_number(bench: ModuleType, apart_s: float) -> None:
    def least(count: int) -> dict[str, float]:
        runs = [bench.driver_seconds(count, bench.SimulatedBackend(apart_s), calls=MANY // count) for _ in range(3)]
        return {what: min(run[what] for run in runs) for what in runs[0]}

    few, many = least(FEW), least(MANY)
    growth = {what: many[what] / few[what] for what in few}
    assert max(growth.values()) <= MOST_GROWTH, f"from {FEW} to {MANY} workers: {growth}"
