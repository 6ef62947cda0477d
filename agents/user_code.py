"""How a user's code is called: within a limit of time, and in a thread where it blocks.

`asyncio.timeout` cancels what awaits. Besides, `in_time` does not count the time for which the loop stands still, or is
kept busy by others; it interrupts code that keeps the loop busy, and leaves behind what continues after a cancellation.
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
"""`signal.signal` without the enums around it, which would take longer than all else of a call."""
_Coroutine: TypeAlias = "CoroutineType[Any, Any, Any]"


class Overdue(BaseException):
    """The time is over. `except Exception` in a user's code does not stop it."""


@coroutine
def in_time(
    work: _Coroutine, limit_s: float, report_busy: Callable[[float], None] = lambda _seconds: None
) -> Generator[Any, None, Any]:
    """Await a coroutine in the task of the caller. One may run within another's.

    Args:
        work: what it awaits is cancelled when the time is over; then it has END_TIMEOUT_S to clean up.
        limit_s: seconds for all of it, and for each stretch in which it keeps the loop busy.
        report_busy: is given the seconds of each stretch.

    Raises:
        Overdue: the time is over.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    # Of a second each, at most. One that lasts longer, as the loop stands still, counts no more.
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
            # Many never wait, and need none.
            timer = timer or loop.call_later(part_s, count_down)
            try:
                yield awaited
                advance = partial(work.send, None)
            except BaseException as error:  # the coroutine's own to deal with, the cancellation included
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
    """Raise Overdue in a coroutine that runs for so long, if in the main thread. Another timer continues afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        if work.cr_running:  # it may ring a moment too late
            raise Overdue

    began = time.monotonic()
    handler = _set_handler(signal.SIGALRM, ring)
    # Again every second, as a bare `except:` may stop one.
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
    """Run blocking work in a thread of its own: one that never ends takes nobody else's, nor holds up the process."""
    outcome: Future[Any] = Future()
    # So that whoever stops waiting does not cancel it.
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where the caller waits
            # SystemExit would end more than the tool, and a future takes no StopIteration.
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            outcome.set_exception(error if is_plain else RuntimeError(f"{type(error).__name__}: {error}"))

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)
