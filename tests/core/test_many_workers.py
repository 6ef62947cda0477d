"""The driver's CPU time per worker does not depend on the number of workers. Workers are simulated."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FEW = 100
MANY = 1600
MOST_GROWTH = 2.0
"""Maximum growth of the CPU time per worker from FEW to MANY workers. About 1 is normal. Quadratic work that takes 1/14
of the time with 100 workers makes it 2."""
APART_S = 0.0003
"""Seconds between two results: 100 of them take longer than one wait."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import scripts/bench_core.py, which has the simulated workers."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    yield importlib.import_module("bench_core")


@pytest.mark.parametrize("apart_s", [0.0, APART_S], ids=["answers-at-once", "answers-one-by-one"])
def test_the_drivers_cpu_time_per_worker_does_not_grow_with_the_number(bench: ModuleType, apart_s: float) -> None:
    def least(count: int) -> dict[str, float]:
        runs = [bench.driver_seconds(count, bench.SimulatedBackend(apart_s), calls=MANY // count) for _ in range(3)]
        return {phase: min(run[phase] for run in runs) for phase in runs[0]}

    few = least(FEW)
    many = least(MANY)
    growth = {phase: many[phase] / few[phase] for phase in few}
    assert max(growth.values()) <= MOST_GROWTH, f"from {FEW} to {MANY} workers: {growth}"
