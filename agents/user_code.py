"""Calls of user code with a timeout, and in threads if it blocks.

`asyncio.timeout` only cancels code that awaits. `in_time` also interrupts code that blocks the event loop, and abandons
code that continues after its cancellation. It does not count the time during which the loop is stopped or blocked by
other tasks.
"""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import CoroutineType, coroutine
from typing import Any, TypeAlias

from components.process.child_process import END_TIMEOUT_S

_set_handler = import_module("_signal").signal
"""`signal.signal` without its conversions to enums, which would take longer than the rest of a call."""
_Coroutine: TypeAlias = "CoroutineType[Any, Any, Any]"


class Overdue(BaseException):
    """Raised at a timeout. A BaseException, so that `except Exception` in user code does not catch it."""


@coroutine
def in_time(
    work: _Coroutine, limit_s: float, report_busy: Callable[[float], None] = lambda _seconds: None
) -> Generator[Any, None, Any]:
    """Await a coroutine with a timeout, in the caller's task. Calls may be nested.

    Args:
        work: the coroutine. At the timeout it is cancelled, and has END_TIMEOUT_S seconds to clean up.
        limit_s: timeout in seconds, for the whole coroutine and for each period in which it blocks the event loop.
        report_busy: callback that receives the duration in seconds of each such period.

    Raises:
        Overdue: the timeout has expired.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    # The timeout is divided into parts of at most a second. If the loop is stopped during a part, the part lasts longer
    # but counts the same, so a stopped loop does not use up the timeout.
    parts_left = max(4, math.ceil(limit_s))
    part_s = limit_s / parts_left
    cancelled = 0

    def count_down() -> None:
        nonlocal parts_left, cancelled, timer
        parts_left -= 1
        if parts_left > 0:
            timer = loop.call_later(part_s, count_down)
            return
        cancelled += 1
        task.cancel()
        timer = loop.call_later(END_TIMEOUT_S, count_down)

    timer: asyncio.TimerHandle | None = None
    advance: Callable[[], Any] = partial(work.send, None)
    try:
        while True:
            began = time.monotonic()
            try:
                with _alarm(work, limit_s):
                    awaited = advance()
            except StopIteration as stop:
                return stop.value
            finally:
                report_busy(time.monotonic() - began)
            # Started here, because many coroutines never wait and need no timer.
            timer = timer or loop.call_later(part_s, count_down)
            try:
                yield awaited
                advance = partial(work.send, None)
            except BaseException as error:  # passed to the coroutine, which may handle it, including a cancellation
                if cancelled > 1:
                    raise
                advance = partial(work.throw, error)
    finally:
        if timer is not None:
            timer.cancel()
        if cancelled and not min(task.uncancel() for _ in range(cancelled)):
            raise Overdue


@contextmanager
def _alarm(work: _Coroutine, seconds: float) -> Iterator[None]:
    """Raise Overdue in a coroutine that runs longer than `seconds` without awaiting. Only in the main thread.

    A timer that was set before continues afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        if work.cr_running:  # False if the signal arrives just after the coroutine has returned
            raise Overdue

    began = time.monotonic()
    handler = _set_handler(signal.SIGALRM, ring)
    # The alarm repeats every second, because a bare `except:` in user code may catch one.
    other_s, other_interval_s = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _set_handler(signal.SIGALRM, handler)
        if other_s:
            left_s = max(other_s - time.monotonic() + began, 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left_s, other_interval_s)


async def in_thread(work: Callable[[], Any]) -> Any:
    """Run blocking code in a new daemon thread.

    A thread pool is not used, because code that never ends would occupy a thread of the pool and block the exit.
    """
    outcome: Future[Any] = Future()
    # Marked as running, so that a caller that stops waiting does not cancel it.
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
            if isinstance(error, StopIteration) or not isinstance(error, Exception):
                # SystemExit would end the process, and a future does not accept StopIteration.
                error = RuntimeError(f"{type(error).__name__}: {error}")
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)
