"""A tracker that writes rollouts in a thread."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from training.tracking.tracker import ROLLOUTS, Tracker

if TYPE_CHECKING:
    from components.batch import Batch

MOST_WAITING = 2
"""Maximum number of batches that are not on disk. A further one waits, so that a slow disk does not fill the memory."""


class BackgroundTracker(Tracker):
    """Tracker that writes rollouts while the next step runs. Everything else is written at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `Tracker`."""
        # Its thread is joined at interpreter exit, so files of a run that ended with an error are completed too.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._waiting = deque[Future[None]]()
        super().__init__(*args, **kwargs)

    def rollouts(self, step: int, batch: Batch, name: str = ROLLOUTS) -> None:
        """See `Tracker.rollouts`. The file is complete when `flush` returns."""
        self._wait(MOST_WAITING - 1)
        self._waiting.append(self._writer.submit(partial(super().rollouts, step, batch, name)))

    def flush(self) -> None:
        """Wait until all rollouts are on disk."""
        self._wait(0)

    def state_dict(self) -> dict[str, Any]:
        """See `Tracker.state_dict`. A checkpoint calls it before it is written, and needs the rows of all its steps."""
        self.flush()
        return super().state_dict()

    def close(self) -> None:
        """See `Tracker.close`."""
        self.flush()
        self._writer.shutdown()
        super().close()

    def _wait(self, count: int) -> None:
        """Wait until at most `count` batches are not on disk."""
        while len(self._waiting) > count:
            self._waiting.popleft().result()
