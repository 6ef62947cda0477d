"""The queue that every training loop reads its batches from. Nothing here needs torch."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from training.run.phase_clock import PhaseClock

Item = TypeVar("Item")


class Stateful(Protocol):
    """What can be set to where a checkpoint was written."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> None: ...


@dataclass(frozen=True)
class Queued(Generic[Item]):
    """A batch that is not yet trained on."""

    batch: Item
    metrics: dict[str, float]
    """Of its generation."""
    seconds: dict[str, float]
    """That the phases of its generation took, where that was in a thread of its own."""
    most_stale: int
    """See RolloutQueue."""
    dropped: Item | None = None
    """Samples of the batch that are not trained on, such as rollouts without a reward."""


class RolloutQueue(Generic[Item]):
    """Generates one batch of samples per training step: when the loop asks for it, or ahead in a thread.

    `for batch in stream:` runs the steps that are left. Inside the loop's body `stream.step` is the number
    of the step at hand, from 1 to `steps`; a state saved there resumes with the step after it.

    With a queue the samples of step s are begun once the bodies of the steps up to s - 1 - `queue_size` have ended, so
    they are drawn from weights that are at most `queue_size` versions behind those that train on them. A body has ended
    when the loop asks for the next batch. What `generate` raises is raised in the loop, in place of that batch. Where
    the loop is left early, the thread ends after the batch that it is at, and is not waited for.
    """

    def __init__(
        self,
        generate: Callable[[int], Item | None],
        steps: int,
        queue_size: int = 0,
        stopped: Callable[[], bool] = lambda: False,
        *,
        sources: Mapping[str, Stateful] | None = None,
        clock: PhaseClock | None = None,
        metrics: Callable[[], Mapping[str, float]] = dict,
        dropped: Callable[[], Item | None] = lambda: None,
        most_stale: int | None = None,
    ) -> None:
        """Set the stream before its first step.

        Args:
            generate: makes the samples of the step whose number it is given, first step 1; None when the data holds
                no more of them, which ends the stream before its `steps`, or when it was stopped on the way.
            steps: training steps in all, those before a resume included.
            queue_size: batches generated ahead of training; 0: each when the loop asks for it.
            stopped: asked before each step; once it is true the iteration ends, with steps left.
            sources: what `generate` takes from and changes, such as the prompts, by the name it has in a checkpoint.
                Their `state_dict` must not change afterwards: it is taken before each generation, and is what a
                checkpoint holds as long as that lasts, and after it has failed, so that the same samples are asked for
                again.
            clock: of the run, told how long the loop waits, and how long the generation of a batch took.
            metrics: of the generation that has just ended, asked for in the thread that generates.
            dropped: samples of the generation that has just ended that are not trained on, asked for in the same
                thread. They wait with the batch.
            most_stale: versions that the weights of any token may be behind. Default: `queue_size`.
        """
        self._generate = generate
        self.queue_size = queue_size
        """Batches that are generated ahead."""
        self._stopped = stopped
        self._clock = clock or PhaseClock()
        self._metrics = metrics
        self._dropped = dropped
        self._most_stale = queue_size if most_stale is None else most_stale
        self.sources = dict(sources or {})
        """What `generate` changes, by name."""
        self.steps = steps
        self.step = 0
        """The step whose batch was handed out last; 0 before the first."""
        self.metrics: dict[str, float] = {}
        """Of the generation of that batch; with a queue also `rollout/queued_batches`: as it was asked for."""
        self.dropped: Item | None = None
        """Samples of that batch that are not trained on."""
        self.most_stale = self._most_stale
        """So many versions may that batch be behind; of one from another run's checkpoint as that run had it."""
        self._queue: deque[Queued[Item]] = deque()  # of the steps that follow `step`, without a gap
        self._at_hand: Queued[Item] | None = None  # of the step at hand
        # Between the loop and the thread, which hold it as they read or write what follows, `step` and `_queue`.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._trained = 0  # steps whose bodies have ended
        self._left = False  # the loop was
        self._done = False  # the thread is
        self._error: BaseException | None = None
        self._under_way: dict[str, dict[str, Any]] | None = None  # of the sources, before what is being generated

    def __len__(self) -> int:
        """Count the steps that are left."""
        return max(self.steps - self.step, 0)

    def __iter__(self) -> Iterator[Item]:
        """Generate and hand out the batches of the steps that are left."""
        self._open()
        self._clock.begin()
        was_left = True
        try:
            while self.step < self.steps and not self._stopped():
                queued = self._next()
                if queued is None:
                    break
                self._at_hand, self.metrics, self.most_stale = queued, queued.metrics, queued.most_stale
                self.dropped = queued.dropped
                yield queued.batch
            was_left = False
        finally:
            self._end(wait=not was_left)

    @property
    def queued(self) -> int:
        """Batches that are generated, and not yet trained on."""
        return len(self._queue)

    @property
    def ending(self) -> bool:
        """Whether no further batch will be asked for: the loop was stopped or left. `generate` may return None then."""
        return self._left or self._stopped()

    def put_back(self) -> None:
        """Take the step at hand back, whose batch nothing was learnt from: it comes first when the loop, which is to be
        left now, continues, also where it resumes from a state.
        """
        with self._changed:
            assert self._at_hand is not None, "no batch was handed out, or it was put back already"
            self._queue.appendleft(self._at_hand)
            self._at_hand = None
            self.step -= 1

    def state_dict(self) -> dict[str, Any]:
        """Give what `load_state_dict` needs; the batches of the queue are in it as they are."""
        with self._changed:
            queue = [_without_none(vars(queued)) for queued in self._queue]
            return {"step": self.step} | ({"queue": queue} if queue else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the step at which the state was saved; more `steps` than before extend the run."""
        self.step = self._trained = int(state["step"])
        self._queue = deque(Queued(**queued) for queued in state.get("queue", ()))
        self._under_way = None

    def states(self) -> dict[str, dict[str, Any]]:
        """Give the states of the stream, as "stream", and of its sources, by name, all of the same moment."""
        with self._changed:
            under_way = self._under_way
            sources = self._source_states() if under_way is None else under_way
            return {"stream": self.state_dict(), **sources}

    def _source_states(self) -> dict[str, dict[str, Any]]:
        return {name: source.state_dict() for name, source in self.sources.items()}

    def _generate_next(self) -> bool:
        """Generate the batch after those that are there; False: there is none, or none is wanted any more."""
        with self._changed:
            step = self.step + len(self._queue) + 1
            if step > self.steps or self.ending:
                return False
            # A state that is taken now, or after a failure, asks for the same samples again.
            self._under_way = self._source_states()
        batch = self._generate(step)
        dropped = self._dropped()
        seconds = self._clock.hand_over() if self.queue_size else {}
        with self._changed:
            if batch is None and self.ending:
                return False
            self._under_way = None
            if batch is None:
                self.steps = step - 1
                return False
            self._queue.append(Queued(batch, dict(self._metrics()), seconds, self._most_stale, dropped))
            self._changed.notify_all()
        return True

    # --- in the loop

    def _next(self) -> Queued[Item] | None:
        """The next batch, once it is there, or made now; None where there is none, or the run is to stop."""
        with self._changed:
            self._trained = self.step
            self._changed.notify_all()
            ready = len(self._queue)
            if self.queue_size:
                with self._clock.phase("wait"):
                    self._changed.wait_for(lambda: self._queue or self._done)
                if self._stopped():
                    return None
            elif not ready:
                self._generate_next()
            if not self._queue:
                if self._error is not None:
                    raise self._error
                return None
            queued = self._queue.popleft()
            self.step += 1
        if self.queue_size:
            queued.metrics["rollout/queued_batches"] = float(ready)
            self._clock.add(queued.seconds)
        return queued

    def _open(self) -> None:
        if self._thread is not None:
            self._thread.join()  # of a loop that was left
        if self._under_way is not None:
            for name, source in self.sources.items():
                source.load_state_dict(self._under_way[name])
            self._under_way = None
        self._trained, self._left, self._done, self._error = self.step, False, False, None
        if not self.queue_size:
            return
        # What finds its way by a context variable, such as the job that a call is of, finds it in the thread too.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._produce,), name="generation", daemon=True)
        self._thread.start()

    def _end(self, wait: bool) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()
        if wait and self._thread is not None:
            self._thread.join()
            if self._error is not None:  # as the run was stopped
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
        """Whether the training is near enough to the step that comes next, or the loop was left."""
        return self._left or self.step + len(self._queue) - self.queue_size <= self._trained


def _without_none(state: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a batch that are set."""
    return {name: value for name, value in state.items() if value is not None}
