"""Calls inside one process: who waits for an answer carries out the calls that are waiting, oldest first.

Local mode lives on this. Nothing here starts a thread: a call runs on the thread of who waits for it, so `breakpoint()`
works wherever it stands.
"""

import functools
import io
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from core.members import Outcome

Key = tuple[str, int]
"""Role and rank of a worker: it does one thing at a time."""


_breakpoints: list[None] = []


@functools.cache
def notice_breakpoints() -> None:
    """From now on time spent at breakpoints makes nobody late. (A hook in their place would be where they stop.)"""
    sys.addaudithook(lambda event, _: _breakpoints.append(None) if event == "builtins.breakpoint" else None)


class InlineCall:
    """One call, waiting or done. It is the reference to its own outcome."""

    __slots__ = ("_run", "key", "outcome")

    def __init__(self, key: Key, run: Callable[[], Any]) -> None:
        self.key = key
        self.outcome: Outcome | None = None
        self._run = run

    def carry_out(self) -> None:
        """Run it, and keep what comes of it. Only Ctrl-C gets through."""
        began, stops = time.monotonic(), len(_breakpoints)
        try:
            value, error = self._run(), None
        except Exception as failure:  # noqa: BLE001 - it is the answer
            value, error = None, failure
        # Who stops at a breakpoint is not late.
        seconds = 0.0 if len(_breakpoints) > stops else time.monotonic() - began
        self.outcome = Outcome(value, error, seconds, raised=True)

    def __reduce__(self) -> Any:
        raise TypeError("an answer on its way inside one process cannot be sent to another; pass its result()")


class Inline:
    """The calls of one process."""

    def __init__(self) -> None:
        self._waiting: list[InlineCall] = []
        self._busy: dict[Key, int] = {}
        self._changed = threading.Condition()

    def send(self, key: Key, run: Callable[[], Any]) -> InlineCall:
        """Take a call in."""
        call = InlineCall(key, run)
        with self._changed:
            self._waiting.append(call)
        return call

    def wait(self, calls: Sequence[InlineCall], timeout: float | None) -> list[InlineCall]:
        """Those that are done; carries calls out until one is.

        With a timeout of 0 it tells what was done already, and then gives way to one call, so that asking again and
        again comes to an end.

        Raises:
            RuntimeError: all that is left waits for itself.
        """
        ready = [call for call in calls if call.outcome is not None]
        if timeout == 0:
            self._step()
            return ready
        while calls and not ready:
            if not self._step():
                names = ", ".join(f"{role}-{rank}" for role, rank in self._busy)
                raise RuntimeError(
                    f"{calls[0].key[0]}-{calls[0].key[1]} is asked by somebody whose own call it is waiting for (at "
                    f"work: {names}), so the answer can never come; let the call return first"
                )
            ready = [call for call in calls if call.outcome is not None]
        return ready

    def _step(self) -> bool:
        """Carry out the oldest call whose worker is free, or wait for another thread that does; False if neither."""
        me = threading.get_ident()
        with self._changed:
            call = next((call for call in self._waiting if call.key not in self._busy), None)
            if call is None:
                others = any(owner != me for owner in self._busy.values())
                if others:
                    self._changed.wait(1.0)
                return others
            self._waiting.remove(call)
            self._busy[call.key] = me
        try:
            call.carry_out()
        finally:
            with self._changed:
                del self._busy[call.key]
                self._changed.notify_all()
        return True


def copied(value: Any) -> Any:
    """What arrives when a value crosses processes: a copy, its arrays read-only. Functions and classes stay the same.

    Raises:
        TypeError: the value could not cross processes (it holds a lock, a socket, ...).
    """
    kept: list[Any] = []
    buffers: list[bytes] = []
    stream = io.BytesIO()
    _Copier(stream, kept, buffers).dump(value)
    stream.seek(0)
    return _Copied(stream, kept, buffers).load()


class _Copier(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, kept: list[Any], buffers: list[bytes]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=lambda b: buffers.append(bytes(b.raw())))
        self._kept = kept

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, FunctionType | ModuleType | type | InlineCall):
            return None
        self._kept.append(obj)
        return len(self._kept) - 1


class _Copied(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, kept: list[Any], buffers: list[bytes]) -> None:
        super().__init__(stream, buffers=buffers)
        self._kept = kept

    def persistent_load(self, pid: int) -> Any:
        return self._kept[pid]
