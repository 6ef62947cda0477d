"""Futures: `Future` for the results of a group, `FutureSequence` for a batch that was split over it.

A long wait logs the workers that have not returned: first after a minute, then at doubling intervals. One failed worker
ends the wait, because its peers may be blocked in a collective that can never complete.
"""

import asyncio
import bisect
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, NoReturn, TypeVar, overload

from core.context import WorkloadContext
from core.errors import ResultLost, WorkerDied, WorkerTimeout, with_note
from core.exports import Export
from core.members import Member, Outcome, Share
from core.sharding import join

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

FIRST_REPORT_AFTER_S = 60.0
"""Seconds of waiting before the first log line. The interval doubles after each line."""

_GRACE_AFTER_FAILURE_S = 1.0
_LOOK_S = 0.05
_MANY = 8
_SLICE_S = 0.02
_SLICE_S_EACH = 1e-4
_MAX_RESENDS = 5
"""Maximum number of times that a call with a lost result is sent again. The pause doubles before each."""
_FIRST_PAUSE_S = 0.25


class Pending:
    """One pending call to one worker.

    A call to a worker that is being replaced waits for the replacement. A call whose result was lost with its worker or
    its node is sent again if its method is idempotent.
    """

    def __init__(self, context: WorkloadContext, member: Member, export: Export, share: Share) -> None:
        self._context = context
        self._export = export
        # Arguments are kept only if the call may be sent again: they may be large, and would stay in memory.
        self._share = share if export.idempotent else None
        self._lost_results = 0
        self._again_at = 0.0
        living = context.directory.replacement(member)
        assert living is not None
        self.member = living
        self.reference = context.transport.send(living, export, share)

    @property
    def method(self) -> str:
        """Name of the called method."""
        return self._export.name

    def outcome(self) -> Outcome | None:
        """Return the outcome of a ready call, or None if the call must be sent again."""
        outcome = self._context.transport.outcome(self.reference)
        if isinstance(outcome.error, WorkerDied) and not outcome.raised and self._is_sent_again(outcome.error):
            return None
        return outcome

    def _is_sent_again(self, error: WorkerDied) -> bool:
        if isinstance(error, ResultLost) and self._share is not None and self._lost_results < _MAX_RESENDS:
            self._again_at = time.monotonic() + _FIRST_PAUSE_S * 2**self._lost_results
            self._lost_results += 1
            self._context.info(f"{self.member.name}.{self.method} is called again: {error}")
            return True
        self._context.directory.report_dead(self.member)
        self._context.emit("death", (self.member.role, self.member.rank, self.member.attempt, str(error)))
        self._again_at = 0.0
        return self._share is not None and self._context.directory.may_return(self.member)

    def send_again(self, timeout: float) -> bool:
        """Send the call to the worker or its replacement. Return False if none is available after `timeout` seconds."""
        assert self._share is not None
        living = self._context.directory.replacement(self.member, timeout)
        if living is None or time.monotonic() < self._again_at:
            return False
        if living == self.member and not self._again_at:
            return False
        self.member = living
        self.reference = self._context.transport.send(living, self._export, self._share)
        return True


def _describe(calls: Sequence[Pending]) -> str:
    label = {1: "rank"}.get(len(calls), "ranks")
    ranks = ", ".join(str(call.member.rank) for call in calls)
    return f"{calls[0].member.role}.{calls[0].method} on {label} {ranks}"


def wait_for(calls: Sequence[Pending], context: WorkloadContext, timeout: float | None) -> list[Any]:
    """Wait for all calls, and return their values in order.

    Raises:
        WorkerTimeout: calls had not returned after `timeout` seconds. The message names role, method and ranks.
        BaseException: the first error of a worker, with its original type. Notes name the worker and the other workers
            that failed.
    """
    with context.waits():
        if timeout is None:
            values = context.transport.values([call.reference for call in calls])
            if values is not None:
                return values
        return _Wait(calls, context, timeout).values()


class _Wait:
    """State of one wait for several calls: results so far, lost calls and failures."""

    def __init__(self, calls: Sequence[Pending], context: WorkloadContext, timeout: float | None) -> None:
        self._calls = calls
        self._context = context
        self._limit = timeout
        self._waiting = {call.reference: call for call in calls}
        self._lost: list[Pending] = []
        self._outcomes: dict[int, Outcome] = {}
        self._has_failed = False

    @property
    def _missing(self) -> list[Pending]:
        return [*self._waiting.values(), *self._lost]

    def values(self) -> list[Any]:
        began = time.monotonic()
        report_at = FIRST_REPORT_AFTER_S
        limit = self._limit
        while self._waiting or self._lost:
            elapsed = time.monotonic() - began
            self._look(min(report_at, limit or report_at) - elapsed)
            if self._has_failed:
                self._raise_first()
            elapsed = time.monotonic() - began
            if limit is not None and elapsed >= limit and self._missing:
                late = WorkerTimeout(f"no result after {limit:g} s from {_describe(self._missing)}")
                late.missing = tuple((c.member.role, c.member.rank, c.member.attempt) for c in self._missing)
                raise late
            if elapsed >= report_at and self._missing:
                name = self._context.identity.name
                self._context.info(f"{name} has waited {elapsed:.0f} s for {_describe(self._missing)}")
                # Doubled, so that a wait of a day is a dozen lines and not a thousand.
                report_at *= 2
        return [self._outcomes[id(call)].value for call in self._calls]

    def _look(self, pause: float) -> None:
        """Send lost calls again, and collect the outcomes that are ready within `pause` seconds."""
        if self._lost:
            sent = [call for i, call in enumerate(self._lost) if call.send_again(0.0 if i else _LOOK_S)]
            self._waiting |= {call.reference: call for call in sent}
            self._lost = [call for call in self._lost if call.reference not in self._waiting]
            pause = 0.0
        count = 1
        if len(self._waiting) > _MANY:
            # Waking up for every single result would take as long as all of them together.
            count = len(self._waiting)
            pause = min(pause, max(_SLICE_S, _SLICE_S_EACH * count))
        for reference in self._context.transport.wait(list(self._waiting), max(0.0, pause), count):
            call = self._waiting.pop(reference)
            outcome = call.outcome()
            if outcome is None:
                self._lost.append(call)
                continue
            self._outcomes[id(call)] = outcome
            self._has_failed |= outcome.error is not None

    def _raise_first(self) -> NoReturn:
        """Raise the first error in rank order, after a grace period for the errors of other workers."""
        # Ranks of a collective often fail together, and the first error to arrive is not always the cause.
        deadline = time.monotonic() + _GRACE_AFTER_FAILURE_S
        while self._waiting and time.monotonic() < deadline:
            self._look(deadline - time.monotonic())
        failed = [(c, self._outcomes[id(c)].error) for c in self._calls if id(c) in self._outcomes]
        (first, error), *others = [(call, error) for call, error in failed if error is not None]
        with_note(error, f"raised by {first.member.name} in {first.method}")
        for other, its_error in others:
            with_note(error, f"{other.member.name} failed too: {its_error!r}")
        if self._missing:
            with_note(error, f"had not returned by then: {_describe(self._missing)}")
        raise error


class Future(Generic[T_co]):
    """Pending results of a group. `await future` works in async code."""

    def __init__(
        self, calls: Sequence[Pending], context: WorkloadContext, finish: Callable[[list[Any]], T_co] = lambda v: v
    ) -> None:
        self.calls = list(calls)
        self._context = context
        self._finish = finish
        self._result: list[T_co] = []

    def result(self, timeout: float | None = None) -> T_co:
        """Wait at most `timeout` seconds (None: no limit) and return the result, or raise the workers' error."""
        # A list of one entry instead of None, because None is a valid result.
        if not self._result:
            self._result.append(self._finish(wait_for(self.calls, self._context, timeout)))
        return self._result[0]

    def open_references(self) -> list[Any]:
        """References whose results have not been fetched yet."""
        return [call.reference for call in self.calls if not self._result]

    def done(self) -> bool:
        """True if `result()` would return without waiting."""
        references = self.open_references()
        return not references or len(self._context.transport.wait(references, 0)) == len(references)

    def __await__(self) -> Generator[Any, None, T_co]:
        yield from self._context.transport.ready(self.open_references()).__await__()
        # `result` waits only if a call must be sent again. A thread keeps that wait from blocking the event loop.
        return (yield from asyncio.to_thread(self.result).__await__())

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be sent to a worker; pass its result()")

    def __repr__(self) -> str:
        return f"Future({_describe(self.calls) if self.calls else 'no worker was called'})"


class ReferenceFuture(Future[T_co], list[Any]):
    """Future of a call with `blocking=False`, which is also the list of the workers' references in rank order.

    As in DLRover, `ray.get(future)` and `ray.wait(future)` accept it as a list. `result()` applies `post_func` and
    joins the results.
    """

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]
    __eq__ = object.__eq__
    __repr__ = Future.__repr__

    def __init__(self, calls: Sequence[Pending], context: WorkloadContext, finish: Callable[[list[Any]], T_co]) -> None:
        super().__init__(calls, context, finish)
        self.extend(call.reference for call in calls)

    def __shard__(self, _: int) -> NoReturn:
        # Being a list it would be split, and workers would receive references instead of values.
        self.__reduce__()


class FutureSequence(Future[Any], Sequence[T]):
    """Sequence of all items of a batch that was split over workers. Reading an item waits only for its chunk.

    `result()` waits for all chunks and joins them: a list for lists, one array for arrays, one Batch for Batches.
    """

    def __init__(self, calls: Sequence[Pending], lengths: Sequence[int], context: WorkloadContext) -> None:
        super().__init__(calls, context, self._joined)
        self.lengths = list(lengths)
        self._starts = [0, *itertools.accumulate(lengths)]
        self._chunks = [Future([call], context) for call in calls]

    def __len__(self) -> int:
        return self._starts[-1]

    def _joined(self, values: list[Any]) -> Any:
        for call, length, value in zip(self.calls, self.lengths, values, strict=True):
            _check_length(call, length, value)
        return join_results(values, self.calls)

    def _chunk(self, index: int) -> Any:
        (value,) = self._chunks[index].result()
        _check_length(self.calls[index], self.lengths[index], value)
        return value

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} items")
        position = index % len(self)
        chunk = bisect.bisect_right(self._starts, position) - 1
        return self._chunk(chunk)[position - self._starts[chunk]]

    def __iter__(self) -> Iterator[T]:
        for index in range(len(self.calls)):
            yield from self._chunk(index)


def _check_length(call: Pending, length: int, value: Any) -> None:
    returned = len(value) if hasattr(value, "__len__") else None
    if returned != length:
        raise ValueError(
            f"{call.member.name}.{call.method} received {length} items and returned {type(value).__name__} of length "
            f"{returned}; return one item per input item"
        )


def join_results(results: Sequence[Any], calls: Sequence[Pending]) -> Any:
    """Join the results of the workers. An empty batch calls no worker and gives an empty list."""
    return join(results, calls[0].method) if results else []
