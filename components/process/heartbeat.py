"""Heartbeats that report progress, for the detection of hung calls.

A call of an hour is not hung while tokens are sampled, micro-batches computed, responses rewarded, or tensors written
or sent. The code that does one of these calls `beat`. A watcher in the same process registers a callback with `listen`.
"""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[], None]] = []
"""Callbacks of this process."""


def listen(listener: Callable[[], None]) -> None:
    """Register a callback for every heartbeat. It runs on the thread that calls `beat` and must return quickly."""
    # A listener that is registered twice would be called twice for each heartbeat.
    if listener not in _listeners:
        _listeners.append(listener)


def beat() -> None:
    """Report that a piece of work is done: call all registered callbacks."""
    for listener in _listeners:
        listener()
