"""Environments of episodes, kept apart: what raises, hangs or dies in one ends that one alone.

In the loop, calls run in the engine's own loop. Code that blocks it is interrupted at the deadline, if the loop runs in
the main thread and the code is Python's or waits for the system. A crash ends the engine.

In threads, each episode has one of its own, with a loop of its own. One that hangs is left behind, and asked to end.

In processes, each episode has one of its own, forked from one that has loaded the agent's file already:

    EnvironmentPool -> python -m agents.environment_process FD PARENT -> one child for each episode

A hang or a crash ends it, and what it has started. Threads that the file starts, and CUDA, do not outlive a fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import logging
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from agents.options import AgentOptions
from agents.user_code import Overdue, in_time
from components.process.child_process import (
    END_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    Child,
    ForeignReplyError,
    described,
    frame,
    receive,
    receive_from,
    reply_to,
    send,
)

BLOCKED_S = 1.0
"""Seconds for which one environment may keep all others waiting before that is logged."""

_log = logging.getLogger(__name__)


class EnvironmentFailure(Exception):
    """Why an environment cannot continue, in one line, and the traceback of its own code."""

    def __init__(self, reason: str, trace: str = "") -> None:
        super().__init__(reason)
        self.trace = trace


class EnvironmentPool:
    """Opens the environments of an agent's episodes, as `options.runs_in` and `options.step_timeout_s` say."""

    def __init__(self, instance: Callable[[], Any], options: AgentOptions) -> None:
        """`instance` comes from the file `options.func_path`, or from a module that can be imported.

        Raises:
            ValueError: the processes of environments cannot load it.
        """
        self.instance = instance
        self.limit_s = options.step_timeout_s
        self._runs_in = options.runs_in
        self._has_warned = False
        if options.runs_in == "process":
            self._server = _start_server(instance, options.func_path)
            self._asking = threading.Lock()

    def open(self) -> Environment:
        """A new environment. Its instance is made with the first call, within that call's time."""
        kinds = {"loop": Environment, "thread": _ThreadEnvironment, "process": _ProcessEnvironment}
        return kinds[self._runs_in](self)

    def close(self) -> None:
        """End the process that makes environments, and those of environments that are still open."""
        if self._runs_in == "process":
            self._server.end()

    def report_busy(self, method: str, seconds: float) -> None:
        """Log once that all others wait while an environment runs."""
        if seconds > BLOCKED_S and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s of %s kept all other episodes waiting for %.1f s; await what it waits for, or set "
                "agent.runs_in=thread (or process, for what uses a core)",
                *(method, _name(self.instance), seconds),
            )

    def ask_server(self, pid: int | None, channel: socket.socket | None = None) -> Any:
        """Have a process made that serves an environment over `channel`, which is closed here; or one ended. It blocks.

        Args:
            pid: the process to end, with what it has started; None: make one.
            channel: the end of a connection for the new process.

        Returns:
            The new one's id; or how the process ended, if it had.
        """
        control = self._server.channel
        with self._asking:
            try:
                control.settimeout(LOAD_TIMEOUT_S)
                send(control, pid)
                if channel is not None:
                    socket.send_fds(control, [b"."], [channel.fileno()])
                    channel.close()
                reply = receive(control)
            except (EOFError, OSError):
                self._server.kill()
                reason = self._server.wait()
                raise EnvironmentFailure(f"the process that makes those of environments ended: {reason}") from None
        if isinstance(reply, OSError):
            raise EnvironmentFailure(f"its process could not be made: {reply}")
        return reply


def _name(instance: Callable[[], Any]) -> str:
    """Return the name of an environment's class, of which `instance` may be a partial."""
    return str(getattr(instance, "func", instance).__qualname__)


def _start_server(instance: Callable[[], Any], func_path: str | None) -> Child:
    name = f"agent {func_path or _name(instance)!r}"
    try:
        setup = {"path": sys.path, "file": func_path, "instance": pickle.dumps(instance)}
    except (pickle.PicklingError, AttributeError) as error:
        raise ValueError(f"{name}: {error}; with agent.runs_in=process, write it at the top of a file") from error
    server = Child("agents.environment_process")
    server.load(setup, name)
    return server


class EnvironmentWorker:
    """The instance of one episode, where its code runs."""

    def __init__(self, instance: Callable[[], Any]) -> None:
        self._class = instance
        self._instance: Any = None

    async def call(self, method: str, states: dict[str, Any]) -> tuple[str, ...]:
        """Call a method, async or not: "ok" and what it returned, or "raised", a line and a traceback."""
        try:
            if self._instance is None:
                self._instance = self._class()
            result = getattr(self._instance, method)(states)
            return "ok", await result if inspect.isawaitable(result) else result
        except (GeneratorExit, KeyboardInterrupt, Overdue):
            raise
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            line, trace = described(error)
            return "raised", f"{method} raised {line}", trace


class Environment:
    """The environment of one episode, in the loop. What it returns is not checked here."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self._worker = EnvironmentWorker(pool.instance)
        self._is_busy = False
        """A call is under way, or was given up."""

    async def close(self) -> None:
        """End what belongs to the episode, and a call that is under way."""

    async def call(self, method: str, states: dict[str, Any]) -> Any:
        """What a method of the instance returns; EnvironmentFailure when it raises, hangs or dies."""
        limit_s = self._pool.limit_s
        self._is_busy = True
        try:
            call = in_time(self._ask(method, states), limit_s, partial(self._pool.report_busy, method))
            status, *values = await call
        except Overdue:
            raise EnvironmentFailure(f"{method} gave no response within {limit_s:g} s (agent.step_timeout_s)") from None
        self._is_busy = False
        if status == "raised":
            raise EnvironmentFailure(*values)
        return values[0]

    async def _ask(self, method: str, states: dict[str, Any]) -> tuple[Any, ...]:
        """What `EnvironmentWorker.call` gives, wherever it runs."""
        return await self._worker.call(method, states)


class _ThreadEnvironment(Environment):
    def __init__(self, pool: EnvironmentPool) -> None:
        super().__init__(pool)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def close(self) -> None:
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._is_busy:
            await asyncio.to_thread(self._thread.join, END_TIMEOUT_S)
        if self._is_busy and self._thread.is_alive():
            # Python's code would keep the interpreter busy for ever; it ends here. A call of the system ends first.
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Overdue))

    async def _ask(self, method: str, states: dict[str, Any]) -> tuple[Any, ...]:
        called = asyncio.run_coroutine_threadsafe(self._worker.call(method, states), self._loop)
        return await asyncio.wrap_future(called)

    def _run(self) -> None:
        with suppress(Overdue), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())


class _ProcessEnvironment(Environment):
    _pid: int | None = None
    _writer: asyncio.StreamWriter | None = None
    _number = 0
    """Of the last call."""

    async def call(self, method: str, states: dict[str, Any]) -> Any:
        try:
            # The time of the first call begins once there is a process: others may be made before it.
            if self._writer is None:
                await self._begin()
            return await super().call(method, states)
        except ForeignReplyError as error:
            await self._end()
            raise EnvironmentFailure(f"{method}: {error}") from None
        except (EOFError, ConnectionError):
            reason = await self._end()
            raise EnvironmentFailure(f"the process of the environment ended in {method}: {reason}") from None

    async def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._pid = await asyncio.to_thread(self._pool.ask_server, None, theirs)
        await asyncio.wait_for(receive_from(self._reader), LOAD_TIMEOUT_S)

    async def _ask(self, method: str, states: dict[str, Any]) -> tuple[Any, ...]:
        assert self._writer is not None
        self._number += 1
        self._writer.write(frame((self._number, method, states)))
        return reply_to(self._number, await receive_from(self._reader))

    async def close(self) -> None:
        if self._writer is not None and not self._is_busy:
            # It lets go of its instance, and closes the connection.
            with suppress(TimeoutError, OSError):
                self._writer.write_eof()
                await asyncio.wait_for(self._reader.read(), END_TIMEOUT_S)
        with suppress(EnvironmentFailure):
            await self._end()

    async def _end(self) -> str:
        pid, self._pid = self._pid, None
        if self._writer is not None:
            self._writer.close()
        return "" if pid is None else await asyncio.to_thread(self._pool.ask_server, pid)
