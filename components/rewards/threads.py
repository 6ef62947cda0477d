"""Calls in parallel threads, such as requests to several reward servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TypeVar, cast

T = TypeVar("T")


def in_threads(works: Sequence[Callable[[], T]]) -> Iterator[T]:
    """Run all functions in parallel threads, and yield their results in the order of completion.

    The first error is raised at once, without waiting for the other threads.
    """
    outcomes: SimpleQueue[tuple[T, None] | tuple[None, Exception]] = SimpleQueue()

    def run(work: Callable[[], T]) -> None:
        try:
            outcomes.put((work(), None))
        except Exception as error:  # noqa: BLE001 - any error is raised in the caller's thread
            outcomes.put((None, error))

    for work in works:
        # Daemon threads, so that a request that hangs does not keep the process alive.
        threading.Thread(target=run, args=(work,), daemon=True).start()
    for _ in works:
        result, error = outcomes.get()
        if error is not None:
            raise error
        yield cast(T, result)
