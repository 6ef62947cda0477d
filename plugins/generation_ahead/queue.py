"""Queue of batches that a thread generates ahead of training."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from training.run.queue import Queued, RolloutQueue

Item = TypeVar("Item")


class AheadQueue(RolloutQueue[Item]):
    """A queue that a thread fills ahead of training.

    Generation for step s starts when step s - 1 - `queue_size` has finished. The samples are therefore drawn from
    weights that are at most `queue_size` versions older than those that train on them. A step has finished when the
    loop requests the next batch. An error in `generate` is raised in the loop after the batches before it. If the loop
    is left early, the thread ends after its current batch. The loop does not wait for it.

    The metrics of a batch have `rollout/queued_batches` in addition: the number of queued batches when the loop
    requested it.
    """

    def __init__(
        self,
        generate: Callable[[int], Item | None],
        steps: int,
        stopped: Callable[[], bool] = lambda: False,
        *,
        queue_size: int,
        most_stale: int | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            generate: see `RolloutQueue`. The thread calls it.
            steps: see `RolloutQueue`.
            stopped: see `RolloutQueue`.
            queue_size: number of batches generated ahead of training, at least 1.
            most_stale: see `RolloutQueue`. Default: `queue_size`.
            options: further arguments of `RolloutQueue`.
        """
        most_stale = queue_size if most_stale is None else most_stale
        super().__init__(generate, steps, stopped, most_stale=most_stale, **options)
        self.queue_size = queue_size
        # Guards `step`, `_queue` and the fields below, which both the loop and the thread read and write.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._trained = 0  # last step that has finished
        self._done = False  # True once the thread has ended
        self._error: BaseException | None = None

    def put_back(self) -> None:
        """See `RolloutQueue.put_back`."""
        with self._changed:
            super().put_back()

    def state_dict(self) -> dict[str, Any]:
        """See `RolloutQueue.state_dict`."""
        with self._changed:
            return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `RolloutQueue.load_state_dict`."""
        super().load_state_dict(state)
        self._trained = self.step

    def states(self) -> dict[str, dict[str, Any]]:
        """See `RolloutQueue.states`."""
        with self._changed:
            return super().states()

    def _begin_next(self) -> int | None:
        with self._changed:
            return super()._begin_next()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    def _seconds(self) -> dict[str, float]:
        return self._clock.take_phases()

    # --- in the loop

    def _next(self) -> Queued[Item] | None:
        with self._changed:
            # A request for the next batch means that the last step has finished, so the thread may go one step further.
            self._trained = self.step
            self._changed.notify_all()
            ready = len(self._queue)
            with self._clock.phase("wait"):
                self._changed.wait_for(lambda: self._queue or self._done)
            if self._stopped():
                return None
            # The error is raised only after the batches before it, which are intact, were trained on.
            if not self._queue and self._error is not None:
                raise self._error
            if not self._queue:
                return None
            queued = self._queue.popleft()
            self.step += 1
        queued.metrics["rollout/queued_batches"] = float(ready)
        self._clock.add(queued.seconds)
        return queued

    def _open(self) -> None:
        if self._thread is not None:
            self._thread.join()  # thread of an earlier loop that was left before its end
        super()._open()
        self._trained = self.step
        self._done = False
        self._error = None
        # The thread needs the context variables of the loop: remote calls read the current job from one.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._produce,), name="generation", daemon=True)
        self._thread.start()

    def _end(self, wait: bool) -> None:
        with self._changed:
            super()._end(wait)
            self._changed.notify_all()
        # An error that has ended the loop is reported now, and not after a generation that may take minutes.
        if wait and self._thread is not None:
            self._thread.join()
            if self._error is not None:  # raised while the run was stopping
                raise self._error

    # --- in the thread

    def _produce(self) -> None:
        is_wanted = True
        try:
            while is_wanted:
                with self._changed:
                    self._changed.wait_for(self._is_near)
                is_wanted = self._generate_next()
        except BaseException as error:  # noqa: BLE001 - the loop raises it
            self._error = error
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _is_near(self) -> bool:
        """Return True if the next batch would not exceed the queue size, or if the loop was left."""
        return self._left or self.step + len(self._queue) - self.queue_size <= self._trained
