"""Environments of episodes, kept apart: what raises, hangs or dies in one ends that one alone.

In the loop, calls run in the engine's own loop. Code that blocks it is interrupted at the deadline, if the loop runs in
the main thread and the code is Python's or waits for the system. A crash ends the engine.

In threads, each episode has one of its own, with a loop of its own. One that hangs is left behind, and asked to end.

In processes, each episode has one of its own, forked from one that has loaded the agent's file already:

    Environments -> python -m agents.environment_process FD PARENT -> one child for each episode

A hang or a crash ends it, and what it has started. Threads that the file starts, and CUDA, do not outlive a fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import itertools
import logging
import pickle
import signal
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import CoroutineType, coroutine
from typing import Any, Literal, TypeAlias

from agents.options import AgentOptions
from components.data.child_process import END_TIMEOUT_S, LOAD_TIMEOUT_S, Child, described, frame, receive_from, send

Kind = Literal["raised", "hung", "died"]
_Coroutine: TypeAlias = "CoroutineType[Any, Any, Any]"

BLOCKED_S = 1.0
"""Seconds for which one environment may keep all others waiting before that is said."""

_set_handler = import_module("_signal").signal
"""`signal.signal` without the enums around it, which would take longer than all else of a step."""
_log = logging.getLogger(__name__)


class EnvironmentFailure(Exception):
    """An environment that can no longer be asked; one line, and the traceback of its own code as a note."""

    def __init__(self, kind: Kind, reason: str, trace: str = "") -> None:
        super().__init__(reason)
        self.kind: Kind = kind
        if trace:
            self.add_note(trace)


class Overdue(BaseException):
    """Raised into a user's code that holds its thread past the deadline; `except Exception` does not stop it."""


class EnvironmentPool:
    """Opens the environments of an agent's episodes, as `options.runs_in` and `options.step_timeout_s` say."""

    def __init__(self, instance: type, options: AgentOptions, func_path: str | None = None) -> None:
        """`func_path` is the file that `instance` comes from; None: a module that can be imported.

        Raises:
            ValueError: its processes cannot load it.
        """
        self.counts: dict[str, int] = {"opened": 0, "raised": 0, "hung": 0, "died": 0}
        self.instance = instance
        self.limit_s = options.step_timeout_s
        self._kind = {"loop": _LoopEnvironment, "thread": _ThreadEnvironment, "process": _ProcessEnvironment}[
            options.runs_in
        ]
        self._warned = False
        self._numbers = itertools.count()
        self._server: Child | None = None
        if options.runs_in == "process":
            self._start_server(func_path)

    async def open(self) -> EnvironmentHandle:
        """A new environment. Its instance is made with the first call, within that call's time."""
        self.counts["opened"] += 1
        return self._kind(self)

    def close(self) -> None:
        """End what all environments share, and the processes of those that are still open."""
        if self._server is not None:
            self._server.end()

    def report_blocked(self, method: str, seconds: float) -> None:
        """Say once that all others wait while an environment runs."""
        if seconds > BLOCKED_S and not self._warned:
            self._warned = True
            _log.warning(
                "%s of %s kept all other episodes waiting for %.1f s; await what it waits for, or set "
                "agent.runs_in=thread (or process, for what uses a core)",
                *(method, self.instance.__name__, seconds),
            )

    def make_process(self, channel: socket.socket) -> int:
        """Have a process made that serves an environment over `channel`; returns the number it goes by."""
        number = next(self._numbers)
        self._emit("make", number, channel)
        return number

    async def end_process(self, number: int) -> str:
        """Have an environment's process ended, and what it has started; returns how it ended, if it had."""
        assert self._server is not None
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                self._emit("end", number, theirs)
            return await receive_from(reader)
        except (EOFError, ConnectionError):
            return f"with the one that makes them: {self._server.wait()}"
        finally:
            writer.close()

    def _emit(self, what: str, number: int, channel: socket.socket) -> None:
        assert self._server is not None
        send(self._server.channel, (what, number))
        socket.send_fds(self._server.channel, [b"."], [channel.fileno()])

    def _start_server(self, func_path: str | None) -> None:
        name = f"agent {func_path or self.instance.__qualname__!r}"
        try:
            setup = {"path": sys.path, "file": func_path, "instance": pickle.dumps(self.instance)}
        except (pickle.PicklingError, AttributeError) as error:
            raise ValueError(f"{name}: {error}; with agent.runs_in=process, write it at the top of a file") from error
        self._server = Child("agents.environment_process")
        try:
            self._server.load(setup, name)
        except ValueError:
            self._server.end()
            raise


class Asked:
    """The instance of one episode, where its code runs."""

    def __init__(self, instance: type) -> None:
        self._class = instance
        self._instance: Any = None

    async def response(self, method: str, states: dict[str, Any]) -> tuple[str, ...]:
        """Call a method, async or not: "ok" and what it returned, or "raised", a line and a traceback."""
        try:
            if self._instance is None:
                self._instance = self._class()
            result = getattr(self._instance, method)(states)
            return "ok", await result if inspect.isawaitable(result) else result
        except (GeneratorExit, Overdue):
            raise
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            task = asyncio.current_task()
            cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()
            if cancelled or (isinstance(error, KeyboardInterrupt) and _in_main_thread()):
                raise
            line, trace = described(error)
            return "raised", f"{method} raised {line}", trace


class Deadline:
    """The time of one call. What others keep the loop busy with does not count: of a slice no more than its length."""

    def __init__(self, limit_s: float) -> None:
        self._left = limit_s
        self._slice = min(1.0, limit_s / 4)
        self._next()

    @property
    def stretch_s(self) -> float:
        """Seconds that code may keep the loop busy in one go; up to a slice late."""
        return max(self._left, self._slice)

    def spend(self) -> bool:
        """Count a slice, and begin the next; False when the time is over."""
        self._left -= min(time.monotonic() - self._began, self.length + self.own_s)
        self._next()
        return self._left > 0

    async def wait(self, task: asyncio.Future[Any]) -> Any:
        """The result of a task; Overdue when the time is over."""
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self.length)
                if not self.spend() and not task.done():
                    raise Overdue
            return task.result()
        finally:
            task.cancel()

    def _next(self) -> None:
        self.length = min(self._slice, self._left)
        self.own_s = 0.0
        """For which the call has itself kept the loop busy, in this slice."""
        self._began = time.monotonic()


class EnvironmentHandle(ABC):
    """The environment of one episode. What it answers is not checked here."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self._failed = self._begun = self._under_way = False

    async def reset(self, states: dict[str, Any]) -> Any:
        """As `AgentInstanceBase.reset`; WorldError when that raises, hangs or dies."""
        return await self._call("reset", states)

    async def step(self, states: dict[str, Any]) -> Any:
        """As `AgentInstanceBase.step`; WorldError when that raises, hangs or dies."""
        return await self._call("step", states)

    async def close(self) -> None:
        """End what belongs to the episode, and a call that is under way. One that failed may be closed, too."""
        if not self._begun:
            return
        self._begun = False
        await self._end()

    async def _call(self, method: str, states: dict[str, Any]) -> Any:
        assert not self._failed, "an environment that failed was asked again"
        try:
            return await self._answer(method, states)
        except EnvironmentFailure as error:
            self._failed = True
            self._pool.counts[error.kind] += 1
            await self.close()
            raise

    async def _answer(self, method: str, states: dict[str, Any]) -> Any:
        self._under_way = True
        try:
            if not self._begun:
                self._begun = True
                await self._begin()
            verdict, *found = await self._ask(method, states, Deadline(self._pool.limit_s))
            self._under_way = False
        except Overdue:
            limit = f"{self._pool.limit_s:g} s (agent.step_timeout_s)"
            raise EnvironmentFailure("hung", f"{method} gave no response within {limit}") from None
        except (EOFError, ConnectionError):
            raise EnvironmentFailure(
                "died", f"the process of the environment ended in {method}: {await self._reason()}"
            ) from None
        except Exception as error:
            raise EnvironmentFailure("raised", f"{method}: {described(error)[0]}", described(error)[1]) from error
        if verdict == "raised":
            raise EnvironmentFailure("raised", *found)
        return found[0]

    @abstractmethod
    async def _begin(self) -> None:
        """Make what the first call needs."""

    @abstractmethod
    async def _ask(self, method: str, states: dict[str, Any], deadline: Deadline) -> tuple[Any, ...]:
        """What `Asked.response` gives; Overdue, or EOFError when there is nobody to answer."""

    @abstractmethod
    async def _end(self) -> None:
        """End what `_begin` made, as far as it came; a call may be under way."""

    async def _reason(self) -> str:
        """Say how it ended."""
        raise NotImplementedError


class _LoopEnvironment(EnvironmentHandle):
    async def _begin(self) -> None:
        self._asked = Asked(self._pool.instance)

    async def _ask(self, method: str, states: dict[str, Any], deadline: Deadline) -> tuple[Any, ...]:
        return await driven(self._asked.response(method, states), deadline, partial(self._pool.report_blocked, method))

    async def _end(self) -> None:
        """All of it was in the task that is here."""


@coroutine
def driven(work: _Coroutine, deadline: Deadline, report_blocked: Callable[[float], None]) -> Generator[Any, None, Any]:
    """Await a coroutine within the time; each stretch in which it keeps the loop busy is timed, and interrupted.

    Overdue when the time is over. One may run within another's.
    """
    loop, task, overdue = asyncio.get_running_loop(), asyncio.current_task(), 0
    assert task is not None

    timer: asyncio.TimerHandle | None = None

    def tick() -> None:
        nonlocal timer, overdue
        if deadline.spend():
            timer = loop.call_later(deadline.length, tick)
            return
        # It may have something to clean up. One that continues nevertheless is then left where it is.
        overdue += 1
        task.cancel()
        timer = loop.call_later(END_TIMEOUT_S, tick)

    go_on: Callable[[], Any] = partial(work.send, None)
    try:
        while True:
            began = time.monotonic()
            try:
                with _Interrupted(work, deadline.stretch_s):
                    awaited = go_on()
            except StopIteration as stop:
                return stop.value
            finally:
                seconds = time.monotonic() - began
                deadline.own_s += seconds
                report_blocked(seconds)
            # Many never wait, and need none.
            timer = timer or loop.call_later(deadline.length, tick)
            try:
                yield awaited
                go_on = partial(work.send, None)
            except BaseException as error:  # the coroutine's own to deal with, the cancellation included
                if overdue > 1:
                    raise
                go_on = partial(work.throw, error)
    finally:
        if timer is not None:
            timer.cancel()
        if overdue and not min(task.uncancel() for _ in range(overdue)):
            raise Overdue


class _Interrupted:
    """Raises Overdue in a coroutine that runs for so long, if in the main thread. Another timer continues
    afterwards.
    """

    __slots__ = ("_began", "_handler", "_is_main", "_other", "_seconds", "_work")

    def __init__(self, work: _Coroutine, seconds: float) -> None:
        self._work, self._seconds, self._is_main = work, seconds, _in_main_thread()

    def __enter__(self) -> None:
        if self._is_main:
            self._began, self._handler = time.monotonic(), _set_handler(signal.SIGALRM, self._ring)
            # Again every second, as a bare `except:` may stop one.
            self._other = signal.setitimer(signal.ITIMER_REAL, self._seconds, 1.0)

    def __exit__(self, *_: object) -> None:
        if self._is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _set_handler(signal.SIGALRM, self._handler)
            if self._other[0]:
                left_s = max(self._other[0] - time.monotonic() + self._began, 1e-3)
                signal.setitimer(signal.ITIMER_REAL, left_s, self._other[1])

    def _ring(self, *_: object) -> None:
        if self._work.cr_running:  # it may ring a moment too late
            raise Overdue


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _ThreadEnvironment(EnvironmentHandle):
    async def _begin(self) -> None:
        self._asked = Asked(self._pool.instance)
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    async def _ask(self, method: str, states: dict[str, Any], deadline: Deadline) -> tuple[Any, ...]:
        there = asyncio.run_coroutine_threadsafe(self._asked.response(method, states), self._loop)
        return await deadline.wait(asyncio.wrap_future(there))

    async def _end(self) -> None:
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._under_way:
            await asyncio.to_thread(self._thread.join, END_TIMEOUT_S)
        if self._under_way and self._thread.is_alive():
            # Python's code would keep the interpreter busy for ever; it ends here. A call of the system ends first.
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Overdue))

    def _live(self) -> None:
        with suppress(Overdue), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())


class _ProcessEnvironment(EnvironmentHandle):
    _number: int | None = None
    _writer: asyncio.StreamWriter | None = None

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._number = self._pool.make_process(theirs)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        # Its call's time begins once it is there: others may be made before it.
        await asyncio.wait_for(receive_from(self._reader), LOAD_TIMEOUT_S)

    async def _ask(self, method: str, states: dict[str, Any], deadline: Deadline) -> tuple[Any, ...]:
        assert self._writer is not None
        self._writer.write(frame((method, states)))
        return await deadline.wait(asyncio.create_task(receive_from(self._reader)))

    async def _end(self) -> None:
        if self._writer is not None:
            if not self._under_way:
                # It lets go of its instance, and closes the connection.
                with suppress(TimeoutError, OSError):
                    self._writer.write_eof()
                    await asyncio.wait_for(self._reader.read(), END_TIMEOUT_S)
            self._writer.close()
        await self._reason()

    async def _reason(self) -> str:
        number, self._number = self._number, None
        return "" if number is None else await self._pool.end_process(number)
