"""Isolated environments of episodes: an environment that raises, hangs or dies ends only its own episode.

`runs_in=loop`: calls run in the event loop of the engine. Blocking code is interrupted at the timeout if the loop runs
in the main thread, and the code is Python code or waits in a system call. A crash ends the engine.

`runs_in=thread`: each episode has a thread with its own event loop. A hung thread is abandoned, after a request to end.

`runs_in=process`: each episode has a process, forked from a server process that has loaded the agent's file:

    EnvironmentPool -> python -m agents.environment_process FD PARENT -> one child for each episode

A hung or crashed process is killed with all processes that it has started. Threads of the agent's file and CUDA do not
survive the fork.
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
"""Seconds for which one environment may block all others before a warning is logged."""

_log = logging.getLogger(__name__)


class EnvironmentFailure(Exception):
    """Raised when an environment cannot continue. Has a one-line reason, and the traceback of the user's code."""

    def __init__(self, reason: str, trace: str = "") -> None:
        super().__init__(reason)
        self.trace = trace


class EnvironmentPool:
    """Factory of the environments of an agent's episodes."""

    def __init__(self, instance: Callable[[], Any], options: AgentOptions) -> None:
        """
        Args:
            instance: class of the environments, from the file `options.func_path` or an importable module.
            options: `runs_in`, `step_timeout_s` and `func_path` are read.

        Raises:
            ValueError: the server process cannot load the class.
        """
        self.instance = instance
        self.limit_s = options.step_timeout_s
        self._runs_in = options.runs_in
        self._has_warned = False
        if options.runs_in == "process":
            self._server = _start_server(instance, options.func_path)
            self._server_lock = threading.Lock()

    def open(self) -> Environment:
        """Return a new environment. Its instance is constructed by the first call, within the timeout of that call."""
        kinds = {"loop": Environment, "thread": _ThreadEnvironment, "process": _ProcessEnvironment}
        return kinds[self._runs_in](self)

    def close(self) -> None:
        """End the server process, and the processes of open environments."""
        if self._runs_in == "process":
            self._server.end()

    def report_busy(self, method: str, seconds: float) -> None:
        """Log a warning, once, if a call of an environment has blocked all other episodes."""
        if seconds > BLOCKED_S and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s of %s blocked all other episodes for %.1f s; use await for blocking operations, or set "
                "agent.runs_in=thread (or process, for CPU-bound code)",
                *(method, _name(self.instance), seconds),
            )

    def request_server(self, pid: int | None, channel: socket.socket | None = None) -> Any:
        """Let the server process fork an environment process, or end one. This call blocks.

        Args:
            pid: id of the process to end, with all processes that it has started. None forks a new one.
            channel: end of a connection for the new process. It is closed here.

        Returns:
            Id of the new process, or the exit reason of the ended one.

        Raises:
            EnvironmentFailure: the server process has ended, or cannot fork.
        """
        control = self._server.channel
        with self._server_lock:
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
                raise EnvironmentFailure(f"the server process of environments has ended: {reason}") from None
        if isinstance(reply, OSError):
            raise EnvironmentFailure(f"the process of the environment could not be created: {reply}")
        return reply


def _name(instance: Callable[[], Any]) -> str:
    """Return the name of an environment's class. `instance` may be a partial of the class."""
    return str(getattr(instance, "func", instance).__qualname__)


def _start_server(instance: Callable[[], Any], func_path: str | None) -> Child:
    name = f"agent {func_path or _name(instance)!r}"
    try:
        setup = {"path": sys.path, "file": func_path, "instance": pickle.dumps(instance)}
    except (pickle.PicklingError, AttributeError) as error:
        raise ValueError(
            f"{name}: {error}; with agent.runs_in=process, define it at the top level of a file"
        ) from error
    server = Child("agents.environment_process")
    server.load(setup, name)
    return server


class EnvironmentWorker:
    """Holder of the instance of one episode, in the thread or process where its code runs."""

    def __init__(self, instance: Callable[[], Any]) -> None:
        self._class = instance
        self._instance: Any = None

    async def call(self, method: str, states: dict[str, Any]) -> tuple[str, ...]:
        """Call a method, sync or async. Return ("ok", result), or ("raised", error in one line, traceback)."""
        try:
            if self._instance is None:
                self._instance = self._class()
            result = getattr(self._instance, method)(states)
            if inspect.isawaitable(result):
                result = await result
            return "ok", result
        except (GeneratorExit, KeyboardInterrupt, Overdue):
            raise
        except BaseException as error:  # the user's code may raise anything, including SystemExit
            task = asyncio.current_task()
            # A cancellation of this task comes from the timeout, which handles it, and not from the user's code.
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            reason, trace = described(error)
            return "raised", f"{method} raised {reason}", trace


class Environment:
    """Environment of one episode that runs in the engine's event loop. Return values are not checked here."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self._worker = EnvironmentWorker(pool.instance)
        self._is_busy = False
        """True while a call is running, and after a call has timed out."""

    async def close(self) -> None:
        """Release the thread or process of the episode, and end a running call."""

    async def call(self, method: str, states: dict[str, Any]) -> Any:
        """Call a method of the instance and return its result.

        Raises:
            EnvironmentFailure: the method raises, exceeds its timeout, or its process dies.
        """
        limit_s = self._pool.limit_s
        self._is_busy = True
        try:
            call = in_time(self._call_worker(method, states), limit_s, partial(self._pool.report_busy, method))
            status, *values = await call
        except Overdue:
            raise EnvironmentFailure(f"{method} did not return within {limit_s:g} s (agent.step_timeout_s)") from None
        self._is_busy = False
        if status == "raised":
            raise EnvironmentFailure(*values)
        return values[0]

    async def _call_worker(self, method: str, states: dict[str, Any]) -> tuple[Any, ...]:
        """Return the result of `EnvironmentWorker.call` in the loop, thread or process of the environment."""
        return await self._worker.call(method, states)


class _ThreadEnvironment(Environment):
    def __init__(self, pool: EnvironmentPool) -> None:
        super().__init__(pool)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def close(self) -> None:
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._is_busy:
            await asyncio.to_thread(self._thread.join, END_TIMEOUT_S)
        if self._is_busy and self._thread.is_alive():
            # Python code in an endless loop would use the interpreter for ever, so an exception is raised in it. A
            # system call must return first.
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Overdue))

    async def _call_worker(self, method: str, states: dict[str, Any]) -> tuple[Any, ...]:
        called = asyncio.run_coroutine_threadsafe(self._worker.call(method, states), self._loop)
        return await asyncio.wrap_future(called)

    def _run(self) -> None:
        with suppress(Overdue), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())


class _ProcessEnvironment(Environment):
    _pid: int | None = None
    _writer: asyncio.StreamWriter | None = None
    _number = 0
    """Number of the last call."""

    async def call(self, method: str, states: dict[str, Any]) -> Any:
        try:
            # The timeout of the first call starts once the process exists, because the server forks one at a time.
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
        channel, worker_channel = socket.socketpair()
        self._reader, self._writer = await asyncio.open_connection(sock=channel)
        self._pid = await asyncio.to_thread(self._pool.request_server, None, worker_channel)
        await asyncio.wait_for(receive_from(self._reader), LOAD_TIMEOUT_S)

    async def _call_worker(self, method: str, states: dict[str, Any]) -> tuple[Any, ...]:
        assert self._writer is not None
        self._number += 1
        self._writer.write(frame((self._number, method, states)))
        return reply_to(self._number, await receive_from(self._reader))

    async def close(self) -> None:
        if self._writer is not None and not self._is_busy:
            # An end of file lets the process delete its instance, whose clean-up would be lost by a kill.
            with suppress(TimeoutError, OSError):
                self._writer.write_eof()
                await asyncio.wait_for(self._reader.read(), END_TIMEOUT_S)
        with suppress(EnvironmentFailure):
            await self._end()

    async def _end(self) -> str:
        pid = self._pid
        self._pid = None
        if self._writer is not None:
            self._writer.close()
        if pid is None:
            return ""
        return await asyncio.to_thread(self._pool.request_server, pid)
