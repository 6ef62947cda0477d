"""Utilisation of an engine's slots. scripts/bench_agents.py measures it exactly."""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest

from components.process.code_files import load_file

BENCH: Any = load_file(Path(__file__).resolve().parents[2] / "scripts" / "bench_agents.py")
SLOTS = 64


class Together(BENCH.TimedRequest):
    """Engine that returns responses once a certain number of requests wait at the same time."""

    waiting: ClassVar[list[asyncio.Future[None]]] = []
    rounds: ClassVar[int] = 0

    async def result(self) -> Any:
        mine = asyncio.get_running_loop().create_future()
        self.waiting.append(mine)
        if len(self.waiting) == SLOTS:
            Together.rounds += 1
            for one in self.waiting:
                one.set_result(None)
            self.waiting.clear()
        await mine
        return await super().result()


@pytest.mark.parametrize(("wait_s", "runs_in"), [(0.0, "loop"), (0.001, "thread")])
def test_the_slots_of_an_engine_are_used(wait_s: float, runs_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BENCH, "TimedRequest", Together)
    monkeypatch.setattr(Together, "rounds", 0)
    # 128 episodes of 4 turns fill all slots for 8 rounds. An empty slot would make the others wait forever.
    BENCH.run_episodes(BENCH.Load(128, slots=SLOTS, answer_s=0.0, wait_s=wait_s, runs_in=runs_in))
    assert Together.rounds == 8
