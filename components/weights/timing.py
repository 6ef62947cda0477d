"""Times of the parts of one weight sync."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class SyncTimer:
    """Seconds that a process spends on each part of a weight sync.

    Operations that are queued on a GPU count towards the part that waits for them.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds by name of the part: gather, send, digest, wake or load."""

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - began

    def waiting(self, part: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items. Add the time until each of them is available to a part."""
        iterator = iter(items)
        while True:
            try:
                with self.measure(part):
                    item = next(iterator)
            except StopIteration:
                return
            yield item
