"""Reward code in processes of its own: what hangs or crashes in it costs one response, and not the run.

    caller -> one thread for each worker -> its child: python -m components.rewards.workers FD PARENT

A batch is cut into chunks that the workers share out. A chunk that fails is asked for again one response at a time, so
that the guilty ones are known. A function that returns another number of rewards than it was given responses ends the
batch instead: called with one response it might seem right. Not a pool of pebble's or loky's: a chunk is one task
there, while here each of its responses has a deadline, and the child inherits neither descriptors nor modules of the
run.
"""

from __future__ import annotations

import logging
import math
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from components.process.child_process import Child, described, run_child, serve_calls, short_line
from components.process.heartbeat import beat
from components.rewards.base import Columns, Responses, RewardOutput, RewardSettings, RewardSource, join_columns
from components.rewards.errors import RewardError, WrongCountError
from components.rewards.functions import CONCURRENT_CALLS, ConcurrentCalls, RewardCode, code_of, one_event_loop

CHUNKS_PER_WORKER = 4
"""More than one, so that a worker with slow responses does not hold up the others."""
MAX_CHUNK = 64
CHUNK_S = 0.05
"""Seconds of work that a chunk for a function of single responses should be."""
MAX_CONCURRENT_CHUNK = 4 * CONCURRENT_CALLS
"""Maximum number of responses in a chunk of concurrent calls. Each chunk is a sign of life of the run."""
CONCURRENT_GRACE_S = 5.0
"""Seconds after the last deadline of concurrent calls until their process counts as hung."""
FEW_FAILURES = 2
"""So many never end a run, unless nobody else was rewarded or none may fail."""

WRONG_COUNT = "wrong count"
"""Status of a call that returned another number of rewards than it was given responses."""

_log = logging.getLogger(__name__)


def allowed_failures(count: int, share: float) -> float:
    """How many of `count` may fail, when a share of them may; of a few, one is a large share, and still says little."""
    allowed = share * count + 1e-9  # 0.29 * 100 is a little below 29
    return max(allowed, FEW_FAILURES) if share > 0 and count > FEW_FAILURES else allowed


class WorkerReward(RewardSource):
    """Reward code in child processes. One call at a time uses all of them."""

    def __init__(
        self, code: str | RewardCode, settings: RewardSettings, *, in_sum: bool = False, in_one_call: bool = False
    ) -> None:
        """Start the children.

        Args:
            code: what they run, or how a scorer or a file is named.
            settings: how it is run.
            in_sum: a response without a reward, None, is no failure: another part of a sum has one.
            in_one_call: the function gets each batch whole and once, also where that fails. For a trial.

        Raises:
            ValueError: it cannot be loaded, or cannot be sent to another process.
        """
        self._code = code_of(code) if isinstance(code, str) else code
        self.source = self._code.source
        try:
            self._setup = {
                "path": sys.path,
                "load": pickle.dumps(self._code.load),
                "timeout_s": settings.timeout_s,
            }
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{self.source} cannot be sent to another process ({short_line(str(error))}); register a function "
                "from the top level of a module"
            ) from error
        self._settings = settings
        self._in_sum = in_sum
        self._in_one_call = in_one_call
        self._is_concurrent = False
        self._closed = False
        # One by one at first: slow responses each have a deadline of their own then, and are not asked for twice.
        self._size = 1
        # Linux ends a child with the thread that has started it; these last until `close`.
        self._threads = ThreadPoolExecutor(settings.workers)
        self._children = set[Child]()
        self._busy = set[Child]()
        self._idle = SimpleQueue[Child | None]()
        try:
            for child in self._threads.map(lambda _: self._start(), range(settings.workers)):
                self._idle.put(child)
        except BaseException:
            self.close()
            raise

    def reward(self, given: Responses) -> RewardOutput:
        """Reward B sequences; RewardError when more of them fail than `max_failed_share` allows."""
        count = len(given.queries)
        if given.responses is None:
            given = given._replace(responses=list(map(_response_of, given.queries, given.prompts)))
        if not self._code.reads_rows:
            given = given._replace(rows=[{}] * count)
        batch = _Batch(self.source, given, self._settings.max_failed_share)
        self._check_open(batch)
        size = self._chunk_size(count)
        chunks = [range(start, min(start + size, count)) for start in range(0, count, size)]
        began = time.monotonic()
        tasks = [self._threads.submit(self._reward_chunk, batch, chunk) for chunk in chunks]
        try:
            parts = [part for task in as_completed(tasks) for part in task.result()]
        except BaseException as error:
            batch.error = error
            self._interrupt()
            wait(tasks)
            raise
        if count and self._code.of_one and not self._is_concurrent:
            one_s = (time.monotonic() - began) * self._settings.workers / count
            self._size = max(1, min(MAX_CHUNK, int(CHUNK_S / one_s), math.ceil(count / self._settings.workers)))
        reasons = {place: reason for place, (reason, _) in batch.failures.items()}
        return join_columns(count, parts, reasons)

    def close(self) -> None:
        """End all children, busy or not."""
        if self._closed:
            return
        self._closed = True
        self._interrupt()
        wait([self._threads.submit(child.end) for child in self._children])
        self._threads.shutdown()

    def _chunk_size(self, count: int) -> int:
        if self._code.of_batch or self._in_one_call:
            return max(count, 1)
        if self._is_concurrent:
            return max(1, min(MAX_CONCURRENT_CHUNK, math.ceil(count / self._settings.workers)))
        if self._code.of_one:
            return self._size
        return max(1, min(MAX_CHUNK, math.ceil(count / (CHUNKS_PER_WORKER * self._settings.workers))))

    def _reward_chunk(self, batch: _Batch, places: Sequence[int]) -> list[tuple[Sequence[int], Columns]]:
        """Reward some responses of a batch, in a thread; those whose chunk fails once more, each alone."""
        status, *results = self._ask(
            batch, [[column[place] for place in places] for column in batch.columns], self._limit_s(len(places))
        )
        if status == "ok":
            beat()
            columns: Columns = results[0]
            for place, failure in columns.failures.items():
                batch.fail(places[place], *failure)
            for place in () if self._in_sum else columns.absent:
                batch.fail(places[place], "it returned None", "")
            return [(places, columns)]
        if status == WRONG_COUNT:
            raise RewardError(f"{self.source} {results[0]}")
        if len(places) == 1 or self._in_one_call:
            for place in places:
                batch.fail(place, *results)
            return []
        again = f"asking again for each of its {len(places)} responses alone"
        _log.warning("%s: %s; %s", self.source, results[0], again)
        return [part for place in places for part in self._reward_chunk(batch, [place])]

    def _limit_s(self, count: int) -> float:
        """Return the seconds that a child may take for one chunk."""
        limit_s = self._settings.timeout_s
        if self._is_concurrent:
            return limit_s * math.ceil(count / CONCURRENT_CALLS) + CONCURRENT_GRACE_S
        return limit_s * count if self._code.of_batch else limit_s

    def _ask(self, batch: _Batch, message: object, timeout_s: float) -> Any:
        """Return the reply of an idle child, as `Child.request` does. A child that has died is replaced before."""
        child = self._idle.get()
        try:
            if child is not None and child.is_dead():
                self._children.discard(child)
                child.end()
                child = None
            child = child or self._start()
            self._busy.add(child)
            self._check_open(batch)
            reply = child.request(message, timeout_s)
            self._check_open(batch)
            return reply
        finally:
            if child is not None:
                self._busy.discard(child)
            self._idle.put(child)

    def _check_open(self, batch: _Batch) -> None:
        if batch.error is not None:
            raise batch.error
        if self._closed:
            raise RuntimeError(f"{self.source} is closed; open it again")

    def _start(self) -> Child:
        child = Child("components.rewards.workers")
        self._is_concurrent = child.load(self._setup, self.source)
        self._children.add(child)
        return child

    def _interrupt(self) -> None:
        """End the children that are busy."""
        for child in list(self._busy):
            child.kill()


@dataclass
class _Batch:
    """The responses of one call, and which of them have failed."""

    source: str
    columns: Sequence[Any]
    """Of `Responses`."""
    max_failed_share: float
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Reason and traceback, by place."""
    error: BaseException | None = None
    """For which it was given up: its other chunks raise the same, and call the function no more."""

    def fail(self, place: int, reason: str, trace: str) -> None:
        """Note that a response has no reward; RewardError when it is one too many."""
        count, prompt = len(self.columns[0]), self.columns[1][place]
        self.failures[place] = f"{reason} (response {place}, prompt {short_line(repr(prompt), 80)})", trace
        if len(self.failures) <= allowed_failures(count, self.max_failed_share):
            return
        first, trace = next(iter(self.failures.values()))
        self.error = error = RewardError(
            f"{self.source} failed for {len(self.failures)} of {count} responses, more than the allowed share of "
            f"{self.max_failed_share:g}; the first: {first}"
        )
        if trace:
            error.add_note(trace)
        raise error


def _response_of(query: str, prompt: str) -> str:
    if not query.startswith(prompt):
        raise ValueError(f"the query {query!r} does not begin with its prompt {prompt!r}; pass responses=... as well")
    return query[len(prompt) :]


# What follows runs in a child.


def _serve(channel: socket.socket) -> None:
    """Load what the first frame names, then reward responses until the parent closes the connection."""
    functions = list[Callable[..., Columns]]()

    def reply(message: Any) -> tuple[Any, ...]:
        try:
            if functions:
                return "ok", functions[0](*message)
            sys.path[:] = list(dict.fromkeys([*message["path"], *sys.path]))
            functions.append(pickle.loads(message["load"])())
            function = functions[0]
            if isinstance(function, ConcurrentCalls):
                function.timeout_s = message["timeout_s"]
            return "ok", isinstance(function, ConcurrentCalls)
        except WrongCountError as error:
            return WRONG_COUNT, short_line(str(error)), ""
        except BaseException as error:  # noqa: BLE001 - the user's file may raise anything, SystemExit included
            return "failed", *described(error)

    with one_event_loop():
        serve_calls(channel, reply)


if __name__ == "__main__":
    run_child(_serve)
