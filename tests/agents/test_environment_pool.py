"""Environment processes: an error, a hang or a death ends only the episode concerned, and leaves no process behind."""

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

from agents.environment_pool import Environment, EnvironmentFailure, EnvironmentPool
from agents.loading import load_agent_file
from agents.options import AgentOptions
from tests.messages import says
from tests.processes import wait_until_gone

PROJECT = Path(__file__).resolve().parents[2]
RUNS_IN = ("loop", "thread", "process")
LIMIT_S = 2.0
PATIENCE_S = 120.0
"""Timeout in seconds for tests without a hang."""

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
        if action == "orphan":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1e5)
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

FIRST_FORK_FAILS = """
import os, sys

def fork():
    os.fork = real_fork
    raise BlockingIOError(11, "Resource temporarily unavailable")

real_fork = os.fork
if "environment_process" in sys.argv[0]:
    os.fork = fork
"""

Mode = Literal["loop", "thread", "process"]


def opened(
    folder: Path, runs_in: Mode, limit_s: float = LIMIT_S, name: str = "AgentInstance", before: str = ""
) -> EnvironmentPool:
    path = folder / "agent.py"
    path.write_text(before + AGENT)
    instance = getattr(load_agent_file(str(path)), name)
    return EnvironmentPool(instance, AgentOptions(func_path=str(path), runs_in=runs_in, step_timeout_s=limit_s))


def played(pool: EnvironmentPool, run_episodes: Callable[[EnvironmentPool], Coroutine[Any, Any, Any]]) -> Any:
    """Return the result of `run_episodes`, and close the environments afterwards."""
    try:
        return asyncio.run(run_episodes(pool))
    finally:
        pool.close()


async def episode(pool: EnvironmentPool, *actions: str, label: Any = 7) -> Any:
    """Return the last response of an environment, or its error."""
    environment = pool.open()
    response: Any = None
    try:
        assert await environment.call("reset", {"observation": "go", "label": label}) == {"observation": f"go{label}"}
        for action in actions:
            response = await step(environment, action, label)
    except EnvironmentFailure as error:
        response = error
    finally:
        await environment.close()
    return response


def step(environment: Environment, action: str, label: Any = 7) -> Coroutine[Any, Any, Any]:
    return environment.call("step", {"action_text": action, "label": label})


@pytest.mark.parametrize("runs_in", RUNS_IN)
def test_the_loop_and_the_thread_are_the_same_in_all_calls(tmp_path: Path, runs_in: Mode) -> None:
    responses = played(opened(tmp_path, runs_in, PATIENCE_S), two_turns)
    # Each environment counts its own two steps. `reset` creates a lock, an event and a task, which both steps use.
    assert [[float(response["rewards"]) for response in of_one] for of_one in responses] == [[1.0, 2.0]] * 2
    threads = [{response["thread"] for response in of_one} for of_one in responses]
    assert all(len(of_one) == 1 for of_one in threads)
    pids = {response["pid"] for of_one in responses for response in of_one}
    assert (len(pids), os.getpid() in pids) == ((2, False) if runs_in == "process" else (1, True))
    assert len({response["draw"] for of_one in responses for response in of_one}) == 4


async def two_turns(pool: EnvironmentPool) -> tuple[Any, ...]:
    return await asyncio.gather(turns(pool), turns(pool))


async def turns(pool: EnvironmentPool) -> list[Any]:
    environment = pool.open()
    await environment.call("reset", {"observation": "go", "label": 7})
    try:
        return [await step(environment, "continue") for _ in range(2)]
    finally:
        await environment.close()


@pytest.mark.parametrize("runs_in", RUNS_IN)
def test_methods_may_be_sync(tmp_path: Path, runs_in: Mode) -> None:
    async def run_episodes(pool: EnvironmentPool) -> Any:
        environment = pool.open()
        assert await environment.call("reset", {"observation": "go"}) == {"observation": "go"}
        response = await step(environment, "continue")
        await environment.close()
        return response

    assert played(opened(tmp_path, runs_in, PATIENCE_S, "Plain"), run_episodes) == {"rewards": 1.0}


@pytest.mark.parametrize("runs_in", RUNS_IN)
def test_an_exception_of_an_environment_ends_only_its_own_episode(tmp_path: Path, runs_in: Mode) -> None:
    async def run_episodes(pool: EnvironmentPool) -> list[Any]:
        actions = ("raise", "exit", "cancel", "continue")
        return await asyncio.gather(*(episode(pool, "continue", action) for action in actions))

    *errors, fine = played(opened(tmp_path, runs_in, PATIENCE_S), run_episodes)
    for error, what in zip(errors, ("KeyError: 'no\\nsuch move'", "SystemExit: 3", "CancelledError"), strict=True):
        assert re.search(says("step raised", what), str(error))
    assert "agent.py" in errors[0].trace
    assert float(fine["rewards"]) == 2.0


@pytest.mark.parametrize("runs_in", RUNS_IN)
def test_an_error_of_the_constructor_is_an_error_of_its_episode(tmp_path: Path, runs_in: Mode) -> None:
    error = played(opened(tmp_path, runs_in, PATIENCE_S, "Unmakable"), episode)
    assert re.search(says("reset raised", "RuntimeError: no licence"), str(error))


HANGS = [
    *(("loop", action) for action in ("wait", "sleep", "spin")),
    ("process", "sleep"),
    # A blocking system call in a thread cannot be interrupted. It ends with the tests.
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
    # Clean-up of processes that continue nevertheless.
    for module in ("environment_pool", "user_code"):
        monkeypatch.setattr(f"agents.{module}.END_TIMEOUT_S", 0.3)

    async def run_episodes(pool: EnvironmentPool) -> list[Any]:
        return [*await asyncio.gather(episode(pool, "continue", action), episode(pool, "continue", "continue"))]

    error, fine = played(opened(tmp_path, runs_in), run_episodes)
    assert re.search(says("step", f"{LIMIT_S:g} s", "agent.step_timeout_s"), str(error))
    assert float(fine["rewards"]) == 2.0


def test_an_environment_that_blocks_the_loop_logs_one_warning_and_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.environment_pool.BLOCKED_S", 0.2)

    async def run_episodes(pool: EnvironmentPool) -> list[Any]:
        return await asyncio.gather(*(episode(pool, "nap") for _ in range(3)), episode(pool, *["continue"] * 5))

    with caplog.at_level(logging.WARNING):
        responses = played(opened(tmp_path, "loop", PATIENCE_S), run_episodes)
    assert [float(response["rewards"]) for response in responses] == [1.0, 1.0, 1.0, 5.0]
    (message,) = (record.getMessage() for record in caplog.records if record.name == "agents.environment_pool")
    assert re.search(says("AgentInstance", "agent.runs_in=thread"), message)


def test_an_existing_alarm_timer_is_restored_after_a_step(tmp_path: Path) -> None:
    rung: list[float] = []

    async def run_episodes(pool: EnvironmentPool) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return await episode(pool, "nap")

    handler = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    try:
        begin, end = played(opened(tmp_path, "loop", PATIENCE_S), run_episodes)["span"]
        while not rung:
            time.sleep(0.01)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert len(rung) == 1
    assert not begin < rung[0] < end


@pytest.mark.parametrize("runs_in", RUNS_IN)
def test_aborting_an_episode_cancels_its_call(tmp_path: Path, runs_in: Mode) -> None:
    waiting = tmp_path / "waiting"

    async def run_episodes(pool: EnvironmentPool) -> None:
        task = asyncio.create_task(episode(pool, "continue", "wait", label=str(waiting)))
        while not waiting.exists():
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    played(opened(tmp_path, runs_in, PATIENCE_S), run_episodes)


@pytest.mark.parametrize(("action", "reason"), [("die", "exit code 3"), ("kill", "signal SIGKILL")])
def test_a_process_that_dies_ends_its_own_environment(tmp_path: Path, action: str, reason: str) -> None:
    async def run_episodes(pool: EnvironmentPool) -> list[Any]:
        return await asyncio.gather(*(episode(pool, "continue", a) for a in (action, "continue")))

    error, fine = played(opened(tmp_path, "process", PATIENCE_S), run_episodes)
    assert re.search(says("process", "ended in step", reason), str(error))
    assert float(fine["rewards"]) == 2.0


def test_the_exit_reason_of_a_dead_server_process_is_in_the_error(tmp_path: Path) -> None:
    async def run_episodes(pool: EnvironmentPool) -> list[Any]:
        return [await episode(pool, "continue", "orphan"), await episode(pool, "continue")]

    for error in played(opened(tmp_path, "process", PATIENCE_S), run_episodes):
        assert re.search(says("server process", "signal SIGKILL"), str(error))


def test_a_process_that_cannot_be_forked_is_an_error_of_its_episode_only(tmp_path: Path) -> None:
    async def run_episodes(pool: EnvironmentPool) -> list[Any]:
        return [await episode(pool, "continue"), await episode(pool, "continue")]

    pool = opened(tmp_path, "process", PATIENCE_S, before=FIRST_FORK_FAILS)
    error, fine = played(pool, run_episodes)
    assert re.search(says("process", "could not be created", "temporarily unavailable"), str(error))
    assert float(fine["rewards"]) == 1.0


def test_tensors_can_be_returned_and_an_unpicklable_result_is_named(tmp_path: Path) -> None:
    async def run_episodes(pool: EnvironmentPool) -> list[Any]:
        return [await episode(pool, "tensor"), await episode(pool, "lambda")]

    response, error = played(opened(tmp_path, "process", PATIENCE_S), run_episodes)
    assert response["rewards"].item() == 0.5
    assert re.search(says("step", "lambda"), str(error))


def test_closing_an_environment_deletes_its_instance_and_ends_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.environment_pool.END_TIMEOUT_S", PATIENCE_S)
    folder = tmp_path / "environments"
    folder.mkdir()

    async def run_episodes(pool: EnvironmentPool) -> list[Any]:
        responses = await asyncio.gather(*(episode(pool, "start", label=str(folder)) for _ in range(2)))
        # The process of each environment, and its child process.
        wait_until_gone(*(pid for response in responses for pid in response["pids"]), timeout_s=PATIENCE_S)
        return responses

    assert (
        len(
            {
                pid
                for response in played(opened(tmp_path, "process", PATIENCE_S), run_episodes)
                for pid in response["pids"]
            }
        )
        == 4
    )
    assert list(folder.iterdir()) == []


@pytest.mark.full
def test_two_hundred_environments_leave_no_process(tmp_path: Path) -> None:
    async def run_episodes(pool: EnvironmentPool) -> list[Any]:
        opened_now = [pool.open() for _ in range(200)]
        begun = (environment.call("reset", {"observation": "go", "label": 7}) for environment in opened_now)
        await asyncio.gather(*begun)
        return [
            response["pid"]
            for response in await asyncio.gather(*(step(environment, "continue") for environment in opened_now))
        ]

    # The environments are not closed one by one. Closing the pool ends them.
    pids = played(opened(tmp_path, "process", PATIENCE_S), run_episodes)
    assert len(set(pids)) == 200
    wait_until_gone(*pids, timeout_s=PATIENCE_S)


def test_a_killed_run_leaves_no_processes(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.py").write_text(
        "import asyncio, sys, time\n"
        f"sys.path.insert(0, {str(PROJECT)!r})\n"
        "from agents.loading import load_agent_file\n"
        "from agents.options import AgentOptions\n"
        "from agents.environment_pool import EnvironmentPool\n"
        "async def main():\n"
        "    environments = EnvironmentPool(load_agent_file('agent.py').AgentInstance, "
        "AgentOptions(func_path='agent.py', runs_in='process'))\n    pids = []\n"
        "    for _ in range(16):\n"
        "        environment = environments.open()\n"
        "        await environment.call('reset', {'observation': '', 'label': ''})\n"
        "        response = await environment.call('step', {'action_text': 'start', 'label': '.'})\n"
        "        pids += response['pids']\n"
        "    print(*pids, flush=True)\n"
        "    await environment.call('step', {'action_text': 'spin', 'label': '.'})\n"
        "asyncio.run(main())\n"
    )
    run = subprocess.Popen([sys.executable, "run.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pids = [int(word) for word in run.stdout.readline().split()]
    assert len(pids) == 2 * 16
    # The server process gets this signal twice. The second one must not prevent it from ending its children.
    run.kill()
    run.wait()
    wait_until_gone(*pids, timeout_s=PATIENCE_S)


def test_a_class_that_another_process_cannot_import_raises_an_error() -> None:
    class AgentInstance:
        pass

    with pytest.raises(ValueError, match=says("AgentInstance", "agent.runs_in=process")):
        EnvironmentPool(AgentInstance, AgentOptions(runs_in="process"))


def test_a_file_that_cannot_be_loaded_in_another_process_raises_an_error_with_its_traceback(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text("class AgentInstance:\n    pass\n")
    instance = load_agent_file(str(path)).AgentInstance
    path.write_text("import no_such_module\n")
    with pytest.raises(ValueError, match=says(path, "'no_such_module'")) as caught:
        EnvironmentPool(instance, AgentOptions(func_path=str(path), runs_in="process"))
    assert "import no_such_module" in caught.value.__notes__[0]
