"""Worlds of episodes: what raises, hangs or dies in one ends that one alone, and nothing of it is left."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import pytest

from agents.loading import load_agent_file
from agents.options import AgentOptions
from agents.worlds import World, WorldError, Worlds
from tests.messages import says
from tests.processes import wait_until_gone

PROJECT = Path(__file__).resolve().parents[2]
RUNS_IN = ("loop", "thread", "process")
LIMIT_S = 2.0
PATIENCE_S = 120.0
"""Where nobody hangs."""

AGENT = """
import asyncio, os, random, signal, subprocess, sys, tempfile, threading, time


class AgentInstance:
    def __init__(self):
        self.steps = 0

    async def reset(self, states, **kwargs):
        self.lock, self.asked = asyncio.Lock(), asyncio.Event()
        self.waiter = asyncio.create_task(self.asked.wait())
        return {"observation": states["observation"] + str(states["label"])}

    async def step(self, states, **kwargs):
        self.steps += 1
        action = states["action_text"]
        if action == "raise":
            raise KeyError("no\\nsuch move")
        if action == "exit":
            sys.exit(3)
        if action == "cancel":
            raise asyncio.CancelledError
        if action == "wait":
            if isinstance(states["label"], str):
                open(states["label"], "x").close()
            await asyncio.sleep(1e9)
        if action == "stubborn":
            while True:
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    pass
        if action == "sleep":
            time.sleep(1e5)
        if action == "spin":
            while True:
                pass
        if action == "swallow":
            try:
                time.sleep(1e5)
            except:
                time.sleep(1e5)
        if action == "nap":
            begin = time.monotonic()
            time.sleep(0.3)
            return {"rewards": 1.0, "span": (begin, time.monotonic())}
        if action == "die":
            os._exit(3)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "tensor":
            import torch
            return {"rewards": torch.tensor(0.5)}
        if action == "lambda":
            return {"rewards": lambda: 1}
        if action == "start":
            self.folder = tempfile.TemporaryDirectory(dir=states["label"])
            self.child = subprocess.Popen(["sleep", "1000"])
            return {"pids": [os.getpid(), self.child.pid], "folder": self.folder.name}
        async with self.lock:
            self.asked.set()
            await self.waiter
        return {"rewards": float(self.steps), "pid": os.getpid(), "draw": random.random(),
                "thread": threading.get_ident()}


class Plain:
    def reset(self, states):
        return {"observation": states["observation"]}

    def step(self, states):
        return {"rewards": 1.0}


class Unmakable:
    def __init__(self):
        raise RuntimeError("no licence")
"""

Mode = Literal["loop", "thread", "process"]


def opened(folder: Path, runs_in: Mode, limit_s: float = LIMIT_S, name: str = "AgentInstance") -> Worlds:
    path = folder / "agent.py"
    path.write_text(AGENT)
    instance = getattr(load_agent_file(str(path)), name)
    return Worlds(instance, AgentOptions(func_path=str(path), runs_in=runs_in, step_timeout_s=limit_s), str(path))


def played(worlds: Worlds, play: Callable[[Worlds], Coroutine[Any, Any, Any]]) -> Any:
    """What `play` gives, with the worlds closed afterwards."""
    try:
        return asyncio.run(play(worlds))
    finally:
        worlds.close()


async def episode(worlds: Worlds, *actions: str, label: Any = 7) -> Any:
    """A world's last answer, or the error it ended with."""
    world = await worlds.open()
    answer: Any = None
    try:
        assert await world.reset({"observation": "go", "label": label}) == {"observation": f"go{label}"}
        for action in actions:
            answer = await step(world, action, label)
    except WorldError as error:
        answer = error
    finally:
        await world.close()
    return answer


def step(world: World, action: str, label: Any = 7) -> Coroutine[Any, Any, Any]:
    return world.step({"action_text": action, "label": label})


@pytest.mark.parametrize("runs_in", RUNS_IN)
def test_what_belongs_to_a_loop_or_a_thread_is_kept_from_call_to_call(tmp_path: Path, runs_in: Mode) -> None:
    answers = played(opened(tmp_path, runs_in, PATIENCE_S), two_turns)
    # Each world counts its own two steps; reset made a lock, an event and a task that both steps used.
    assert [[float(answer["rewards"]) for answer in of_one] for of_one in answers] == [[1.0, 2.0]] * 2
    threads = [{answer["thread"] for answer in of_one} for of_one in answers]
    assert all(len(of_one) == 1 for of_one in threads)
    pids = {answer["pid"] for of_one in answers for answer in of_one}
    assert (len(pids), os.getpid() in pids) == ((2, False) if runs_in == "process" else (1, True))
    assert len({answer["draw"] for of_one in answers for answer in of_one}) == 4


async def two_turns(worlds: Worlds) -> tuple[Any, ...]:
    return await asyncio.gather(turns(worlds), turns(worlds))


async def turns(worlds: Worlds) -> list[Any]:
    world = await worlds.open()
    await world.reset({"observation": "go", "label": 7})
    try:
        return [await step(world, "go on") for _ in range(2)]
    finally:
        await world.close()


@pytest.mark.parametrize("runs_in", RUNS_IN)
def test_methods_need_not_be_async(tmp_path: Path, runs_in: Mode) -> None:
    async def play(worlds: Worlds) -> Any:
        world = await worlds.open()
        assert await world.reset({"observation": "go"}) == {"observation": "go"}
        answer = await step(world, "go on")
        await world.close()
        return answer

    assert played(opened(tmp_path, runs_in, PATIENCE_S, "Plain"), play) == {"rewards": 1.0}


@pytest.mark.parametrize("runs_in", RUNS_IN)
def test_what_a_world_raises_ends_it_alone(tmp_path: Path, runs_in: Mode) -> None:
    async def play(worlds: Worlds) -> list[Any]:
        actions = ("raise", "exit", "cancel", "go on")
        return await asyncio.gather(*(episode(worlds, "go on", action) for action in actions))

    worlds = opened(tmp_path, runs_in, PATIENCE_S)
    *errors, fine = played(worlds, play)
    for error, what in zip(errors, ("KeyError: 'no\\nsuch move'", "SystemExit: 3", "CancelledError"), strict=True):
        assert re.search(says("step", what), str(error))
    assert "agent.py" in errors[0].__notes__[0]
    assert {error.kind for error in errors} == {"raised"}
    assert float(fine["rewards"]) == 2.0
    assert worlds.counts == {"opened": 4, "raised": 3, "hung": 0, "died": 0}


@pytest.mark.parametrize("runs_in", RUNS_IN)
def test_an_instance_that_cannot_be_made_is_an_error_of_its_episode(tmp_path: Path, runs_in: Mode) -> None:
    error = played(opened(tmp_path, runs_in, PATIENCE_S, "Unmakable"), episode)
    assert error.kind == "raised"
    assert re.search(says("reset", "RuntimeError: no licence"), str(error))


HANGS = [
    *(("loop", action) for action in ("wait", "sleep", "spin")),
    ("process", "sleep"),
    # In a thread, a call of the system is left behind until it ends, here with the tests themselves.
    *(("thread", action) for action in ("wait", "spin")),
    # "swallow" is interrupted for a second time after one second.
    *(pytest.param("loop", action, marks=pytest.mark.full) for action in ("swallow", "stubborn")),
    *(pytest.param("process", action, marks=pytest.mark.full) for action in ("wait", "spin", "swallow", "stubborn")),
    pytest.param("thread", "stubborn", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("runs_in", "action"), HANGS)
def test_a_hanging_step_ends_its_own_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_in: Mode, action: str
) -> None:
    # For what goes on nevertheless, to clean up.
    monkeypatch.setattr("agents.worlds.END_TIMEOUT_S", 0.3)

    async def play(worlds: Worlds) -> list[Any]:
        return [*await asyncio.gather(episode(worlds, "go on", action), episode(worlds, "go on", "go on"))]

    worlds = opened(tmp_path, runs_in)
    error, fine = played(worlds, play)
    assert error.kind == "hung"
    assert re.search(says("step", f"{LIMIT_S:g} s", "agent.step_timeout_s"), str(error))
    assert float(fine["rewards"]) == 2.0
    assert worlds.counts == {"opened": 2, "raised": 0, "hung": 1, "died": 0}


def test_a_world_that_blocks_the_loop_is_named_once_and_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.worlds.BLOCKED_S", 0.2)

    async def play(worlds: Worlds) -> list[Any]:
        return await asyncio.gather(*(episode(worlds, "nap") for _ in range(3)), episode(worlds, *["go on"] * 5))

    with caplog.at_level(logging.WARNING):
        answers = played(opened(tmp_path, "loop", PATIENCE_S), play)
    assert [float(answer["rewards"]) for answer in answers] == [1.0, 1.0, 1.0, 5.0]
    (message,) = (record.getMessage() for record in caplog.records if record.name == "agents.worlds")
    assert re.search(says("AgentInstance", "agent.runs_in=thread"), message)


def test_a_timer_of_somebody_else_rings_after_a_step(tmp_path: Path) -> None:
    rung: list[float] = []

    async def play(worlds: Worlds) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return await episode(worlds, "nap")

    handler = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    try:
        begin, end = played(opened(tmp_path, "loop", PATIENCE_S), play)["span"]
        while not rung:
            time.sleep(0.01)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert len(rung) == 1
    assert not begin < rung[0] < end


@pytest.mark.parametrize("runs_in", RUNS_IN)
def test_an_episode_that_is_aborted_takes_its_call_with_it(tmp_path: Path, runs_in: Mode) -> None:
    waiting = tmp_path / "waiting"

    async def play(worlds: Worlds) -> None:
        task = asyncio.create_task(episode(worlds, "go on", "wait", label=str(waiting)))
        while not waiting.exists():
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    worlds = opened(tmp_path, runs_in, PATIENCE_S)
    played(worlds, play)
    assert worlds.counts == {"opened": 1, "raised": 0, "hung": 0, "died": 0}


@pytest.mark.parametrize(("action", "reason"), [("die", "exit code 3"), ("kill", "signal SIGKILL")])
def test_a_process_that_dies_ends_its_own_world(tmp_path: Path, action: str, reason: str) -> None:
    async def play(worlds: Worlds) -> list[Any]:
        return await asyncio.gather(*(episode(worlds, "go on", a) for a in (action, "go on")))

    worlds = opened(tmp_path, "process", PATIENCE_S)
    error, fine = played(worlds, play)
    assert error.kind == "died"
    assert re.search(says("step", reason), str(error))
    assert float(fine["rewards"]) == 2.0
    assert worlds.counts == {"opened": 2, "raised": 0, "hung": 0, "died": 1}


def test_tensors_cross_and_what_cannot_is_named(tmp_path: Path) -> None:
    async def play(worlds: Worlds) -> list[Any]:
        return [await episode(worlds, "tensor"), await episode(worlds, "lambda")]

    answer, error = played(opened(tmp_path, "process", PATIENCE_S), play)
    assert answer["rewards"].item() == 0.5
    assert error.kind == "raised"
    assert re.search(says("step", "lambda"), str(error))


def test_a_closed_world_leaves_no_process_and_cleans_up_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.worlds.END_TIMEOUT_S", PATIENCE_S)
    folder = tmp_path / "worlds"
    folder.mkdir()

    async def play(worlds: Worlds) -> list[Any]:
        found = await asyncio.gather(*(episode(worlds, "start", label=str(folder)) for _ in range(2)))
        # Each world's own process, and the one that it had started.
        wait_until_gone(*(pid for answer in found for pid in answer["pids"]), timeout_s=PATIENCE_S)
        return found

    assert len({pid for answer in played(opened(tmp_path, "process", PATIENCE_S), play) for pid in answer["pids"]}) == 4
    assert list(folder.iterdir()) == []


@pytest.mark.full
def test_two_hundred_worlds_leave_no_process(tmp_path: Path) -> None:
    async def play(worlds: Worlds) -> list[Any]:
        opened_now = [await worlds.open() for _ in range(200)]
        await asyncio.gather(*(world.reset({"observation": "go", "label": 7}) for world in opened_now))
        return [answer["pid"] for answer in await asyncio.gather(*(step(world, "go on") for world in opened_now))]

    # They are not closed one by one: what ends them is that all is closed.
    pids = played(opened(tmp_path, "process", PATIENCE_S), play)
    assert len(set(pids)) == 200
    wait_until_gone(*pids, timeout_s=PATIENCE_S)


def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.py").write_text(
        "import asyncio, sys, time\n"
        f"sys.path.insert(0, {str(PROJECT)!r})\n"
        "from agents.loading import load_agent_file\n"
        "from agents.options import AgentOptions\n"
        "from agents.worlds import Worlds\n"
        "async def main():\n"
        "    worlds = Worlds(load_agent_file('agent.py').AgentInstance, AgentOptions(runs_in='process'), 'agent.py')\n"
        "    pids = []\n"
        "    for _ in range(16):\n"
        "        world = await worlds.open()\n"
        "        await world.reset({'observation': '', 'label': ''})\n"
        "        answer = await world.step({'action_text': 'start', 'label': '.'})\n"
        "        pids += answer['pids']\n"
        "    print(*pids, flush=True)\n"
        "    await world.step({'action_text': 'spin', 'label': '.'})\n"
        "asyncio.run(main())\n"
    )
    run = subprocess.Popen([sys.executable, "run.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pids = [int(word) for word in run.stdout.readline().split()]
    assert len(pids) == 2 * 16
    # Of this, what makes the worlds hears twice: the second word must not keep it from ending what they have started.
    run.kill()
    run.wait()
    wait_until_gone(*pids, timeout_s=PATIENCE_S)


def test_a_class_that_another_process_cannot_find_is_refused() -> None:
    class AgentInstance:
        pass

    with pytest.raises(ValueError, match=says("AgentInstance", "agent.runs_in=process")):
        Worlds(AgentInstance, AgentOptions(runs_in="process"))


def test_a_file_that_loads_only_here_is_refused_with_its_traceback(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text("class AgentInstance:\n    pass\n")
    instance = load_agent_file(str(path)).AgentInstance
    path.write_text("import no_such_module\n")
    with pytest.raises(ValueError, match=says(path, "'no_such_module'")) as caught:
        Worlds(instance, AgentOptions(runs_in="process"), str(path))
    assert "import no_such_module" in caught.value.__notes__[0]
