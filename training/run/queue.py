"""The queue that all training loops read their batches from. This module does not import torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from components.registry import load
from training.run.phase_clock import PhaseClock

Item = TypeVar("Item")


class Stateful(Protocol):
    """An object whose state a checkpoint saves and restores."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> None: ...


@dataclass(frozen=True)
class Queued(Generic[Item]):
    """A batch that was generated but not trained on."""

    batch: Item
    metrics: dict[str, float]
    """Metrics of its generation."""
    seconds: dict[str, float]
    """Seconds of the phases of its generation, if a separate thread generated it."""
    most_stale: int
    """Maximum staleness of the batch in weight versions; see RolloutQueue."""
    dropped: Item | None = None
    """Samples that are excluded from training, such as rollouts without a reward."""


class RolloutQueue(Generic[Item]):
    """Generates one batch of samples per training step, on demand. A subclass may generate ahead of training.

    `for batch in stream:` iterates over the remaining steps. Inside the loop, `stream.step` is the number of the
    current step, from 1 to `steps`. A state that is saved there resumes with the next step.

    An error in `generate` is raised in the loop in place of that batch.
    """

    queue_size = 0
    """Number of batches generated ahead of training."""

    def __init__(
        self,
        generate: Callable[[int], Item | None],
        steps: int,
        stopped: Callable[[], bool] = lambda: False,
        *,
        sources: Mapping[str, Stateful] | None = None,
        clock: PhaseClock | None = None,
        metrics: Callable[[], Mapping[str, float]] = dict,
        dropped: Callable[[], Item | None] = lambda: None,
        most_stale: int = 0,
    ) -> None:
        """
        Args:
            generate: generates the samples of a step, given its number from 1. It returns None at the end of the data,
                which ends the stream early, or if a stop was requested in the meantime.
            steps: total number of training steps, including those before a resume.
            stopped: called before each step. The iteration ends once it returns True.
            sources: objects that `generate` reads from and changes, such as the prompts, by their name in a checkpoint.
                Their states are taken before each generation. A checkpoint that is written during the generation, or
                after it has failed, holds these states, so that a resume generates the same samples again. The
                returned dictionaries must therefore not change later.
            clock: clock of the run. It measures how long the loop waits and how long a generation takes.
            metrics: returns the metrics of the last generation. Called in the thread that generates.
            dropped: returns the samples of the last generation that are excluded from training. Called in the same
                thread. They are queued with the batch.
            most_stale: maximum staleness of the weights of any token, in versions.
        """
        self._generate = generate
        self._stopped = stopped
        self._clock = clock or PhaseClock()
        self._metrics = metrics
        self._dropped = dropped
        self._most_stale = most_stale
        self.sources = dict(sources or {})
        """Objects that `generate` changes, by name."""
        self.steps = steps
        self.step = 0
        """Number of the current step, whose batch was yielded last. 0 before the first."""
        self.metrics: dict[str, float] = {}
        """Metrics of the generation of the current batch."""
        self.dropped: Item | None = None
        """Samples of the current batch that are excluded from training."""
        self.most_stale = self._most_stale
        """Maximum staleness of the current batch, in versions. A batch from a checkpoint keeps the limit of its run."""
        self._queue: deque[Queued[Item]] = deque()  # batches of the steps after `step`, without a gap
        self._at_hand: Queued[Item] | None = None  # batch of the current step
        self._left = False  # True once the loop was left
        self._under_way: dict[str, dict[str, Any]] | None = None  # source states before the generation in progress

    def __len__(self) -> int:
        """Return the number of remaining steps."""
        return max(self.steps - self.step, 0)

    def __iter__(self) -> Iterator[Item]:
        """Generate and yield the batches of the remaining steps."""
        self._open()
        self._clock.begin()
        was_left = True
        try:
            while self.step < self.steps and not self._stopped():
                queued = self._next()
                if queued is None:
                    break
                self._at_hand = queued
                self.metrics = queued.metrics
                self.most_stale = queued.most_stale
                self.dropped = queued.dropped
                yield queued.batch
            was_left = False
        finally:
            self._end(wait=not was_left)

    @property
    def queued(self) -> int:
        """Number of batches that were generated but not trained on."""
        return len(self._queue)

    @property
    def ending(self) -> bool:
        """True if no further batch is needed, because the loop was stopped or left. `generate` may then return None."""
        return self._left or self._stopped()

    def put_back(self) -> None:
        """Return the batch of the current step to the queue, for a step that was not trained.

        The loop must be left afterwards. The batch comes first when the loop continues or a run resumes.
        """
        assert self._at_hand is not None, "no batch was handed out, or it was put back already"
        self._queue.appendleft(self._at_hand)
        self._at_hand = None
        self.step -= 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`. It holds the queued batches as objects."""
        queue = [_without_none(vars(queued)) for queued in self._queue]
        return _without_none({"step": self.step, "queue": queue or None})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step at which the state was saved. A larger `steps` than before extends the run."""
        self.step = int(state["step"])
        self._queue = deque(Queued(**queued) for queued in state.get("queue", ()))
        self._under_way = None

    def states(self) -> dict[str, dict[str, Any]]:
        """Return a consistent snapshot of the stream, as "stream", and of its sources, by name."""
        # During a generation the sources are ahead of the queue. The states from before it fit the queue.
        return {"stream": self.state_dict(), **(self._under_way or self._source_states())}

    def _source_states(self) -> dict[str, dict[str, Any]]:
        return {name: source.state_dict() for name, source in self.sources.items()}

    def _generate_next(self) -> bool:
        """Generate the batch after the queued ones. Return False if there is none or no more are needed."""
        step = self._begin_next()
        if step is None:
            return False
        batch = self._generate(step)
        with self._changing():
            # The generation was cut short by the stop. `_under_way` stays, so a resume repeats it.
            if batch is None and self.ending:
                return False
            self._under_way = None
            # The data ended early: the run has fewer steps than were planned.
            if batch is None:
                self.steps = step - 1
                return False
            metrics = dict(self._metrics())
            self._queue.append(Queued(batch, metrics, self._seconds(), self._most_stale, self._dropped()))
        return True

    def _changing(self) -> AbstractContextManager[None]:
        """Return the context in which a generated batch is added to the queue."""
        return nullcontext()

    def _begin_next(self) -> int | None:
        """Return the step of the batch after the queued ones, or None if no more are needed."""
        step = self.step + len(self._queue) + 1
        if step > self.steps or self.ending:
            return None
        # A checkpoint that is written from now on, or after a failure, has to generate the same samples again.
        self._under_way = self._source_states()
        return step

    def _seconds(self) -> dict[str, float]:
        """Return the seconds of the phases of the last generation, if another thread than the loop's ran it."""
        return {}

    def _next(self) -> Queued[Item] | None:
        """Generate the next batch, or take it from the queue. Return None if there is none or a stop was requested."""
        if not self._queue:
            self._generate_next()
        if not self._queue:
            return None
        self.step += 1
        return self._queue.popleft()

    def _open(self) -> None:
        """Prepare a loop over the remaining steps."""
        # A generation failed or was cut short before. The sources go back to where it started.
        if self._under_way is not None:
            for name, source in self.sources.items():
                source.load_state_dict(self._under_way[name])
            self._under_way = None
        self._left = False

    def _end(self, wait: bool) -> None:  # noqa: ARG002 - for a subclass
        """End a loop. With `wait`, it has ended by itself; otherwise it was left."""
        self._left = True


def open_queue(
    generate: Callable[[int], Item | None],
    steps: int,
    queue_size: int = 0,
    stopped: Callable[[], bool] = lambda: False,
    **options: Any,
) -> RolloutQueue[Item]:
    """Return the queue of a run; see `RolloutQueue`.

    Args:
        generate: see `RolloutQueue`.
        steps: see `RolloutQueue`.
        queue_size: number of batches generated ahead of training. Above 0, a plug-in provides the queue.
        stopped: see `RolloutQueue`.
        options: further arguments of `RolloutQueue`.

    Raises:
        MissingPlugin: no plug-in generates ahead.
    """
    # The plug-in is not needed then, and a batch is generated in the thread of the loop.
    if not queue_size:
        return RolloutQueue(generate, steps, stopped, **options)
    ahead = load("rollout queue", "ahead", f"asynchronous.queue_size={queue_size}")
    return ahead(generate, steps, stopped, queue_size=queue_size, **options)


def _without_none(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields whose value is not None."""
    return {name: value for name, value in state.items() if value is not None}
