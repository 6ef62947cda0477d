"""How busy the slots of an engine are kept; scripts/bench_agents.py measures it at its full size."""

from pathlib import Path

import pytest

from components.data.child_process import load_file

BENCH = load_file(Path(__file__).resolve().parents[2] / "scripts" / "bench_agents.py")


@pytest.mark.parametrize(("wait_s", "runs_in"), [(0.0, "loop"), (0.025, "thread")])
def test_the_slots_of_an_engine_are_kept_busy(wait_s: float, runs_in: str) -> None:
    # 128 episodes of 4 turns in 64 slots, 0.1 s an answer: at best 8 * 0.1 = 0.8 s, and 51.2 s one after the other.
    load = BENCH.Load(128, answer_s=0.1, wait_s=wait_s, runs_in=runs_in)
    assert load.ideal_s == pytest.approx(8 * (0.1 + wait_s))
    # A quiet machine reaches 0.85; this one may be busy with other things.
    assert load.ideal_s / BENCH.play(load) > 0.1
