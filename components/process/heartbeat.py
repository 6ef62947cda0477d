"""Signs that work makes progress, for who watches for hangs.

A call of an hour is no hang while tokens are drawn, micro-batches computed, responses rewarded, tensors written or
sent. Whatever does one of these says so with `beat`; whoever wants to hear of it in this process calls `listen` once.
"""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[], None]] = []


def listen(listener: Callable[[], None]) -> None:
    """Call `listener` at every beat, on the thread that beats; it has to be quick."""
    if listener not in _listeners:
        _listeners.append(listener)


def beat() -> None:
    """A piece of work is done."""
    for listener in _listeners:
        listener()
