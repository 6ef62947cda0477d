"""Waiting for results: `Future` for the answers of a group, `FutureSequence` for a batch that was split over it.

Every wait says whom it is waiting for, first after a minute, then less and less often. One failed worker ends the
wait: its peers may be stuck in a collective that can never complete.
"""

import asyncio
import bisect
import contextlib
import contextvars
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar, overload

from core.context import WorkloadContext
from core.errors import WorkerDied, WorkerTimeout, with_note
from core.invocation import Export
from core.members import Member, Outcome, Transport
from core.parts import Parts, spread
from core.sharding import join

T = TypeVar("T")

FIRST_REPORT_AFTER_S = 60.0
"""Seconds of waiting before the first "still waiting" line; the pause doubles each time."""

_GRACE_AFTER_FAILURE_S = 1.0
_LOOK_FOR_REPLACEMENT_S = 0.05


class Pending:
    """One call on its way to one worker.

    A call to a worker that is being replaced waits for the replacement. One that the worker did not live to answer is
    sent again if its method is idempotent.
    """

    def __init__(
        self,
        context: WorkloadContext,
        member: Member,
        export: Export,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._context = context
        self._export = export
        # Kept only where they may be needed again: they may be large.
        self._arguments = (args, kwargs) if export.idempotent else None
        living = context.recovery.replacement(member)
        assert living is not None
        self.member = living
        if export.replay:
            self._before = context.recovery.remember(living, export, args, kwargs)
        self.reference = context.transport.send(living, export, args, kwargs)

    @property
    def method(self) -> str:
        """Its name."""
        return self._export.name

    def outcome(self) -> Outcome | None:
        """What came of it, once its reference is ready; None if it is to be sent again."""
        found, recovery = self._context.transport.outcome(self.reference), self._context.recovery
        if isinstance(found.error, WorkerDied):
            recovery.met_death(self.member)
            if self._arguments and recovery.may_return(self.member):
                return None
        if found.error is not None and self._export.replay:
            recovery.take_back(self.member, self.method, self._before)
        return found

    def send_again(self, timeout: float) -> bool:
        """Send it to the replacement, if there is one after `timeout` seconds."""
        assert self._arguments is not None
        living = self._context.recovery.replacement(self.member, timeout)
        if living is None or living == self.member:
            return False
        self.member = living
        self.reference = self._context.transport.send(living, self._export, *self._arguments)
        return True


def _describe(calls: Sequence[Pending]) -> str:
    ranks = ", ".join(str(call.member.rank) for call in calls)
    return f"{calls[0].member.role}.{calls[0].method} on rank{'s' if len(calls) > 1 else ''} {ranks}"


def wait_for(calls: Sequence[Pending], context: WorkloadContext, timeout: float | None) -> list[Any]:
    """Values of all calls, in their order.

    Raises:
        WorkerTimeout: after `timeout` seconds some had not answered; it names role, method and ranks. Where calls run
            in this process nothing can end them: they are late when they come back, each by its own time.
        BaseException: the first error of a worker, with its own type; a note names the worker, another lists the
            others that failed.
    """
    if timeout is None and (values := context.transport.values([call.reference for call in calls])) is not None:
        return values
    began, report_at, limit = time.monotonic(), FIRST_REPORT_AFTER_S, timeout
    if context.transport.is_inline:
        limit = None
    waiting, lost, late, outcomes = list(calls), list[Pending](), list[Pending](), dict[int, Outcome]()
    while waiting or lost:
        elapsed = time.monotonic() - began
        pause = report_at - elapsed if limit is None else min(report_at - elapsed, limit - elapsed)
        if lost:
            waiting += [call for call in lost if call.send_again(_LOOK_FOR_REPLACEMENT_S)]
            lost, pause = [call for call in lost if call not in waiting], 0.0
        ready = set(context.transport.wait([c.reference for c in waiting], max(0.0, pause)))
        for call in [call for call in waiting if call.reference in ready]:
            outcome = call.outcome()
            if outcome is None:
                lost.append(call)
                continue
            outcomes[id(call)] = outcome
            if timeout is not None and outcome.seconds > timeout:
                late.append(call)
        waiting = [call for call in waiting if call.reference not in ready]
        if any(outcome.error is not None for outcome in outcomes.values()):
            _raise_first(calls, waiting, outcomes, context.transport)
        elapsed, missing = time.monotonic() - began, [*waiting, *lost]
        if missing and limit is not None and elapsed >= limit:
            raise _timeout(missing, limit)
        if missing and elapsed >= report_at:
            context.info(f"{context.identity.name} has waited {elapsed:.0f} s for {_describe(missing)}")
            report_at *= 2
    if late and timeout is not None:
        raise _timeout(late, timeout)
    return [outcomes[id(call)].value for call in calls]


def _timeout(missing: list[Pending], timeout: float) -> WorkerTimeout:
    late = WorkerTimeout(f"no answer after {timeout:g} s from {_describe(missing)}")
    late.missing = tuple((call.member.role, call.member.rank, call.member.attempt) for call in missing)
    return late


def _raise_first(
    calls: Sequence[Pending], waiting: list[Pending], outcomes: dict[int, Outcome], transport: Transport
) -> None:
    """Raise the first error in rank order, after a moment in which the others may report theirs."""
    deadline = time.monotonic() + _GRACE_AFTER_FAILURE_S
    while waiting and time.monotonic() < deadline:
        ready = set(transport.wait([c.reference for c in waiting], max(0.0, deadline - time.monotonic())))
        for call in [c for c in waiting if c.reference in ready]:
            outcomes[id(call)] = call.outcome() or Outcome()
        waiting = [c for c in waiting if c.reference not in ready]
    failed = [call for call in calls if id(call) in outcomes and outcomes[id(call)].error is not None]
    error = outcomes[id(failed[0])].error
    assert error is not None
    with_note(error, f"raised by {failed[0].member.name} in {failed[0].method}")
    for other in failed[1:]:
        with_note(error, f"{other.member.name} failed too: {outcomes[id(other)].error!r}")
    if waiting:
        with_note(error, f"had not answered by then: {_describe(waiting)}")
    raise error


class _Answers(ABC):
    """What both kinds of future can do. `await future` works in async code."""

    _context: WorkloadContext

    @abstractmethod
    def result(self, timeout: float | None = None) -> Any:
        """Wait at most `timeout` seconds (None: for ever) and return the result, or raise the workers' error."""

    @abstractmethod
    def open_references(self) -> list[Any]:
        """References to what has not been looked at yet."""

    def done(self) -> bool:
        """True when `result()` would not wait."""
        references = self.open_references()
        return not references or len(self._context.transport.wait(references, 0)) == len(references)

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(self)` once there is a result or an error, on a thread of its own; in local mode, now."""

        def wait() -> None:
            with contextlib.suppress(Exception):  # the callback finds it in result()
                self.result()
            callback(self)

        if self._context.transport.is_inline:
            wait()
        else:
            within = contextvars.copy_context()
            threading.Thread(target=within.run, args=(wait,), name="troupe-callback", daemon=True).start()

    def __await__(self) -> Generator[Any, None, Any]:
        if self._context.transport.is_inline:
            yield from asyncio.sleep(0).__await__()
            return self.result()
        return (yield from asyncio.to_thread(self.result).__await__())


class Future(_Answers, Generic[T]):
    """The answers of a group that are still on their way."""

    def __init__(
        self, calls: Sequence[Pending], context: WorkloadContext, finish: Callable[[list[Any]], T] = lambda v: v
    ) -> None:
        self.calls = list(calls)
        self._context = context
        self._finish = finish
        self._result: list[T] = []
        self._lock = threading.Lock()

    def result(self, timeout: float | None = None) -> T:
        """Wait at most `timeout` seconds (None: for ever) and return the result, or raise the workers' error."""
        if not self._result:
            values = wait_for(self.calls, self._context, timeout)
            with self._lock:  # a callback's thread may have waited too, and `finish` is to run once
                if not self._result:
                    self._result.append(self._finish(values))
        return self._result[0]

    def open_references(self) -> list[Any]:
        """References to what has not been looked at yet."""
        return [] if self._result else [call.reference for call in self.calls]

    def __repr__(self) -> str:
        return f"Future({_describe(self.calls) if self.calls else 'no worker was called'})"


class Parted:
    """A future of answers to be joined, one item for each that was given out.

    It can be an argument of another group's call: its workers fetch their parts from those who made them, and nobody
    in between does.
    """

    calls: list[Pending]
    lengths: list[int]

    def __len__(self) -> int:
        return sum(self.lengths)

    def _answering(self) -> list[Pending]:
        return self.calls

    def _joined(self, parts: list[Any]) -> Any:
        # An empty batch was given to nobody, so nobody could say what its answer would be.
        return join(parts, self.calls[0].method) if parts else []

    def __shard__(self, n: int) -> list[Parts]:
        calls = self._answering()
        return spread([call.reference for call in calls], self.lengths, n, calls[0].method if calls else "nothing")


class JoinedFuture(Parted, Future[Any]):
    """The answers of a call that was split over a worker group, to be joined."""

    def __init__(
        self, calls: Sequence[Pending], context: WorkloadContext, lengths: list[int], counting: list[int]
    ) -> None:
        """`counting`: which of the calls have the answers, in their order; the others are their peers."""
        super().__init__(calls, context, lambda values: self._joined([values[i] for i in counting]))
        self._counting, self.lengths = counting, lengths

    def _answering(self) -> list[Pending]:
        return [self.calls[i] for i in self._counting]


class FutureSequence(Parted, _Answers, Sequence[T]):
    """All items of a batch that was split over workers; it blocks only for the chunks that are looked at."""

    def __init__(self, calls: Sequence[Pending], lengths: Sequence[int], context: WorkloadContext) -> None:
        self.calls = list(calls)
        self.lengths = list(lengths)
        self._starts = [0, *itertools.accumulate(lengths)]
        self._context = context
        self._chunks: dict[int, Any] = {}

    def _chunk(self, index: int) -> Any:
        if index not in self._chunks:
            (value,) = wait_for([self.calls[index]], self._context, None)
            self._store(index, value)
        return self._chunks[index]

    def _store(self, index: int, value: Any) -> None:
        call, wanted = self.calls[index], self.lengths[index]
        got = len(value) if hasattr(value, "__len__") else None
        if got != wanted:
            raise ValueError(
                f"{call.member.name}.{call.method} was given {wanted} items and returned "
                f"{type(value).__name__} of length {got}; return one item for each"
            )
        self._chunks[index] = value

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} of {len(self)} items")
        chunk = bisect.bisect_right(self._starts, position) - 1
        return self._chunk(chunk)[position - self._starts[chunk]]

    def __iter__(self) -> Iterator[T]:
        for index in range(len(self.calls)):
            yield from self._chunk(index)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for all and return them joined: a list for lists, one array for arrays, one Batch for Batches."""
        missing = [index for index in range(len(self.calls)) if index not in self._chunks]
        for index, value in zip(
            missing, wait_for([self.calls[i] for i in missing], self._context, timeout), strict=True
        ):
            self._store(index, value)
        return self._joined([self._chunks[i] for i in range(len(self.calls))])

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all items; the first error of a worker is raised."""
        self.result(timeout)

    def open_references(self) -> list[Any]:
        """References to what has not been looked at yet."""
        return [call.reference for i, call in enumerate(self.calls) if i not in self._chunks]

    def __repr__(self) -> str:
        return f"FutureSequence({len(self)} items from {len(self.calls)} workers)"


def whole(value: Any) -> Any:
    """What goes whole to a worker: a future of joined answers as its parts, everything else as it is.

    Raises:
        ValueError: a future of separate answers.
    """
    if isinstance(value, Parted):
        return value.__shard__(1)[0]
    if isinstance(value, Future):
        raise ValueError(f"{value} has several answers that are not joined; pass its result()")
    return value


AnyFuture = TypeVar("AnyFuture", bound=_Answers)


def as_completed(futures: Iterable[AnyFuture], timeout: float | None = None) -> Iterator[AnyFuture]:
    """Futures in the order in which they come to an end, well or badly; `result()` of each then does not wait.

    Raises:
        TimeoutError: some had not come to an end after `timeout` seconds.
    """
    waiting, ended = list(futures), set[Any]()
    deadline = None if timeout is None else time.monotonic() + timeout
    while waiting:
        ready = [future for future in waiting if ended.issuperset(future.open_references())]
        yield from ready
        waiting = [future for future in waiting if future not in ready]
        if ready or not waiting:
            continue
        pause = None if deadline is None else max(0.0, deadline - time.monotonic())
        missing = {r for future in waiting for r in future.open_references()} - ended
        found = waiting[0]._context.transport.wait(list(missing), pause)
        if not found and pause == 0.0:
            raise TimeoutError(f"{len(waiting)} of the futures have not come to an end after {timeout:g} s: {waiting}")
        ended.update(found)
