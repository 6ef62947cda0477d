"""Reward code in child processes, so that code that hangs or crashes costs a response and not the run.

    caller -> one thread per worker -> its child process: python -m components.rewards.workers FD PARENT

A batch is split into chunks, which are distributed over the workers. A failed chunk is repeated one response at a time
to identify the responses that fail. If a function returns another number of rewards than responses, the batch fails
instead, because a call with a single response might return one reward by chance.

Process pools such as pebble or loky are not used: a chunk would be one task there, while here each response has its own
deadline. The child inherits neither descriptors nor modules of the run.
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
from components.rewards.code import CONCURRENT_CALLS, ConcurrentFunction, RewardCode, code_of, one_event_loop
from components.rewards.errors import RewardError, WrongCountError

CHUNKS_PER_WORKER = 4
"""Number of chunks per worker. More than one, so that a worker with slow responses does not delay the batch."""
MAX_CHUNK = 64
"""Maximum number of responses in a chunk."""
CHUNK_S = 0.05
"""Target duration in seconds of a chunk for a function of single responses."""
MAX_CONCURRENT_CHUNK = 4 * CONCURRENT_CALLS
"""Maximum number of responses in a chunk of concurrent calls. Each chunk sends a heartbeat."""
CONCURRENT_GRACE_S = 5.0
"""Seconds after the last deadline of concurrent calls until their process counts as hung."""
FEW_FAILURES = 2
"""Number of failures that never end a run, unless no other response has a reward or no failure is allowed."""

WRONG_COUNT = "wrong count"
"""Status of a call that returned another number of rewards than responses."""

_log = logging.getLogger(__name__)


def allowed_failures(count: int, share: float) -> float:
    """Return the maximum number of failures among `count` responses for a maximum share.

    It is at least FEW_FAILURES (unless the share is 0), because a single failure in a small batch exceeds most shares.
    """
    allowed = share * count + 1e-9  # 0.29 * 100 is slightly below 29 in floating point
    # In a batch of so few responses, all of them could fail without an error.
    if share > 0 and count > FEW_FAILURES:
        allowed = max(allowed, FEW_FAILURES)
    return allowed


class WorkerReward(RewardSource):
    """Reward code in child processes. It must be called from one thread at a time, which uses all processes."""

    def __init__(
        self, code: str | RewardCode, settings: RewardSettings, *, in_sum: bool = False, in_one_call: bool = False
    ) -> None:
        """Start the child processes.

        Args:
            code: reward code, or the specification of a scorer or a file.
            settings: settings of the processes.
            in_sum: do not count a reward of None as a failure, because another part of a sum may have a reward.
            in_one_call: pass each batch in a single call, and do not repeat failed calls. For trials.

        Raises:
            ValueError: the code cannot be loaded, or cannot be sent to another process.
        """
        if isinstance(code, str):
            code = code_of(code)
        self._code = code
        self.source = code.source
        self.reads_queries = code.reads_rows  # scorers read neither
        try:
            self._setup = {"path": sys.path, "load": pickle.dumps(code.load), "timeout_s": settings.timeout_s}
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
        # Chunks of one response at first: then each slow response has its own deadline and is not computed twice.
        self._size = 1
        # Linux ends a child when the thread that started it ends (PR_SET_PDEATHSIG). These threads live until `close`.
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

    def reward(self, samples: Responses) -> RewardOutput:
        """Compute the rewards of B responses.

        Raises:
            RewardError: the share of failed responses is above `max_failed_share`, or a call returned another number of
                rewards than responses.
        """
        count = len(samples.queries)
        if samples.responses is None:
            samples = samples._replace(responses=list(map(_response_of, samples.queries, samples.prompts)))
        # Scorers read no rows, and these can be large (token ids, columns of the data), so they are not sent.
        if not self._code.reads_rows:
            samples = samples._replace(rows=[{}] * count)
        batch = _Batch(self.source, samples, self._settings.max_failed_share)
        self._check_open(batch)
        size = self._chunk_size(count)
        chunks = [range(start, min(start + size, count)) for start in range(0, count, size)]
        began = time.monotonic()
        tasks = [self._threads.submit(self._reward_chunk, batch, chunk) for chunk in chunks]
        try:
            parts = [part for task in as_completed(tasks) for part in task.result()]
        except BaseException as error:
            # KeyboardInterrupt too: the other chunks must stop before the caller goes on.
            batch.error = error
            self._interrupt()
            wait(tasks)
            raise
        if count and self._code.of_one and not self._is_concurrent:
            one_s = (time.monotonic() - began) * self._settings.workers / count
            # Fast functions get larger chunks, because a message costs more time than such a call.
            self._size = max(1, min(MAX_CHUNK, int(CHUNK_S / one_s), math.ceil(count / self._settings.workers)))
        reasons = {index: reason for index, (reason, _) in batch.failures.items()}
        return join_columns(count, parts, reasons)

    def close(self) -> None:
        """End all child processes, including busy ones."""
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

    def _reward_chunk(self, batch: _Batch, indices: Sequence[int]) -> list[tuple[Sequence[int], Columns]]:
        """Compute the rewards of some responses of a batch. Responses of a failed chunk are repeated one at a time."""
        message = [[column[index] for index in indices] for column in batch.columns]
        status, *results = self._request(batch, message, self._limit_s(len(indices)))
        if status == "ok":
            beat()
            columns: Columns = results[0]
            for i, failure in columns.failures.items():
                batch.fail(indices[i], *failure)
            if not self._in_sum:
                for i in columns.absent:
                    batch.fail(indices[i], "it returned None", "")
            return [(indices, columns)]
        # Not repeated one at a time: a single response might get one number by chance.
        if status == WRONG_COUNT:
            raise RewardError(f"{self.source} {results[0]}")
        if len(indices) == 1 or self._in_one_call:
            for index in indices:
                batch.fail(index, *results)
            return []
        _log.warning("%s: %s; repeating its %d responses one at a time", self.source, results[0], len(indices))
        return [part for index in indices for part in self._reward_chunk(batch, [index])]

    def _limit_s(self, count: int) -> float:
        """Return the timeout of a chunk in seconds."""
        timeout_s = self._settings.timeout_s
        if self._is_concurrent:
            return timeout_s * math.ceil(count / CONCURRENT_CALLS) + CONCURRENT_GRACE_S
        if self._code.of_batch:
            return timeout_s * count
        return timeout_s

    def _request(self, batch: _Batch, message: object, timeout_s: float) -> Any:
        """Return the reply of an idle child, as `Child.request` does. A dead child is replaced first."""
        child = self._idle.get()
        try:
            if child is not None and child.is_dead():
                self._children.discard(child)
                child.end()
                child = None
            child = child or self._start()
            self._busy.add(child)
            # Checked before and after: the batch may end while this thread waits for a child or for its reply.
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
        """Kill the busy children, so that the threads that wait for their replies return."""
        for child in list(self._busy):
            child.kill()


@dataclass
class _Batch:
    """The responses of one call, and the failures among them."""

    source: str
    """Name of the code in error messages."""
    columns: Sequence[Any]
    """Fields of `Responses`."""
    max_failed_share: float
    """Maximum share of failed responses."""
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Index -> reason and traceback."""
    error: BaseException | None = None
    """Error that ended the batch. Its other chunks raise it too, instead of calling the function."""

    def fail(self, index: int, reason: str, trace: str) -> None:
        """Record that a response has no reward.

        Raises:
            RewardError: too many responses have failed.
        """
        count = len(self.columns[0])
        prompt = short_line(repr(self.columns[1][index]), 80)
        self.failures[index] = f"{reason} (response {index}, prompt {prompt})", trace
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


# The rest of this module runs in a child process.


def _serve(channel: socket.socket) -> None:
    """Load the function of the first message, then compute rewards until the parent closes the connection."""
    functions = list[Callable[..., Columns]]()

    def reply(message: Any) -> tuple[Any, ...]:
        try:
            if functions:
                return "ok", functions[0](*message)
            # The parent's import path, so that modules beside the user's script can be imported here.
            sys.path[:] = list(dict.fromkeys([*message["path"], *sys.path]))
            functions.append(pickle.loads(message["load"])())
            function = functions[0]
            if isinstance(function, ConcurrentFunction):
                function.timeout_s = message["timeout_s"]
            return "ok", isinstance(function, ConcurrentFunction)
        except WrongCountError as error:
            return WRONG_COUNT, short_line(str(error)), ""
        except BaseException as error:  # noqa: BLE001 - the user's file may raise anything, SystemExit included
            return "failed", *described(error)

    with one_event_loop():
        serve_calls(channel, reply)


if __name__ == "__main__":
    run_child(_serve)
