"""Reward code in processes of its own: what hangs or crashes in it costs one response, and not the run.

    caller -> one thread for each worker -> its child: python -m components.data.reward_workers FD PARENT

A batch is cut into chunks that the workers share out. A chunk that fails is asked for again one response at a time, so
that the guilty ones are known. A thread owns its child, because Linux sends the signal that ends a child with its
parent when the *thread* that started it ends. Not a pool of pebble's or loky's: a chunk is one task there, while here
each of its responses has a deadline, and the child inherits neither descriptors nor modules of the run.
"""

from __future__ import annotations

import importlib
import logging
import math
import pickle
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from components.data.child_process import (
    END_TIMEOUT_S,
    Child,
    described,
    load_file,
    run_child,
    serve_calls,
    short_line,
)
from components.data.rewards import (
    FUNCTION_NAME,
    Columns,
    RewardError,
    RewardOutput,
    RewardSettings,
    check_lengths,
    join_columns,
    read_columns,
    takes_responses,
)
from components.data.score_functions import ScoreCode, load_scores
from components.data.scorers import Scorer, Style, get_scorer, get_style, module_of
from components.heartbeat import beat

CHUNKS_PER_WORKER = 4
"""More than one, so that a worker with slow responses does not hold up the others."""
MAX_CHUNK = 64
CHUNK_S = 0.05
"""Seconds of work that a chunk for a function of single responses should be."""
FEW_FAILURES = 2
"""So many never end a run, unless nobody else was rewarded or none may fail."""

_log = logging.getLogger(__name__)


def allowed_failures(count: int, share: float) -> float:
    """How many of `count` may fail, when a share of them may; of a few, one is a large share, and still says little."""
    allowed = share * count + 1e-9  # 0.29 * 100 is a little below 29
    return max(allowed, FEW_FAILURES) if share > 0 and count > FEW_FAILURES else allowed


class RewardWorkers:
    """Reward code in child processes. One call at a time uses all of them."""

    _takes_all = False
    """Whether one call gets all responses of a batch, and the time of all of them."""

    def __init__(self, source: str, setup: dict[str, Any], settings: RewardSettings) -> None:
        """Start the children; ValueError when what `setup` names, which errors call `source`, cannot be loaded."""
        self.source = source
        self._settings = settings
        self._setup = setup
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._ready: SimpleQueue[Exception | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._children: dict[Child, _Batch | None] = {}
        self._closed = False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(settings.workers)]
        for thread in self._threads:
            thread.start()
        try:
            for _ in self._threads:
                error = self._ready.get()
                if error is not None:
                    raise error
        except BaseException:
            self.close()
            raise

    def rewards(
        self, columns: Sequence[Sequence[Any]], size: int | None = None, missing: float | None = None
    ) -> RewardOutput:
        """Reward B sequences; RewardError when more of them fail than `max_failed_share` allows.

        Args:
            columns: what the code is given, each of length B; the second has the prompts.
            size: so many responses go to a worker at a time. Default: a share of them, at most MAX_CHUNK.
            missing: see `join_columns`.
        """
        if self._closed:
            raise RuntimeError(f"{self.source} is closed; open it again")
        columns = [list(column) for column in columns]
        count = len(columns[0])
        size = size or min(MAX_CHUNK, math.ceil(count / (CHUNKS_PER_WORKER * len(self._threads))))
        chunks = [list(range(start, min(start + size, count))) for start in range(0, count, size or 1)]
        batch = _Batch(self.source, columns, chunks, self._settings.max_failed_share)
        for _ in self._threads:
            self._batches.put(batch)
        try:
            batch.wait()
        finally:
            self._abandon(batch)
        return join_columns(self.source, count, batch.parts, batch.failures, missing)

    def close(self) -> None:
        """End all children, busy or not."""
        with self._lock:
            self._closed = True
            batches = {batch for batch in self._children.values() if batch is not None}
        for batch in batches:
            batch.stop(RuntimeError(f"{self.source} was closed"))
            self._abandon(batch)
        for _ in self._threads:
            self._batches.put(None)
        # Twice the time: a thread gives its child END_TIMEOUT_S. What is left then is a child that is still loading.
        deadline = time.monotonic() + 2 * END_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            for child in self._children:
                child.kill()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _abandon(self, batch: _Batch) -> None:
        """Take nothing more of a batch, and end the children that are at it: there are none when it is done."""
        batch.stop(None)
        with self._lock:
            for child, busy_with in self._children.items():
                if busy_with is batch:
                    child.kill()

    def _work(self) -> None:
        """Run one worker: a thread's whole life."""
        child: Child | None = None
        try:
            child = self._start()
            self._ready.put(None)
            while (batch := self._batches.get()) is not None:
                try:
                    child = self._share(batch, child)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the caller waits
                    batch.stop(error)
        except Exception as error:  # noqa: BLE001 - as above
            self._ready.put(error)
        finally:
            if child is not None:
                self._end(child)

    def _share(self, batch: _Batch, child: Child) -> Child:
        """Take chunks of a batch until it is done; return the child that is then alive."""
        while (chunk := batch.take()) is not None:
            if child.is_dead():
                self._end(child)
                child = self._start()
            with self._lock:
                # Under the lock: a batch is given up either before this, or by one that sees the child at it.
                if batch.stopped:
                    break
                self._children[child] = batch
            timeout_s = self._settings.timeout_s * (len(chunk) if self._takes_all else 1)
            verdict, *found = child.verdict(batch.request(chunk), timeout_s)
            with self._lock:
                self._children[child] = None
            if verdict == "ok":
                batch.done(chunk, *found)
            else:
                batch.failed(chunk, *found)
        return child

    def _start(self) -> Child:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self.source} was closed")
            child = Child("components.data.reward_workers")
            self._children[child] = None
        try:
            child.load(self._setup, self.source)
        except ValueError:
            self._end(child)
            raise
        return child

    def _end(self, child: Child) -> None:
        child.end()
        with self._lock:
            self._children.pop(child, None)


class WorkerReward(RewardWorkers):
    """A scorer or a user's `reward_func`."""

    def __init__(self, spec: str, settings: RewardSettings) -> None:
        """Start the children; ValueError when the file of `spec` cannot be loaded."""
        source = f"{FUNCTION_NAME} in {spec!r}" if spec.endswith(".py") else f"scorer {spec!r}"
        super().__init__(source, _setup(spec), settings)

    def __call__(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
    ) -> RewardOutput:
        """Reward B sequences; RewardError when more of them fail than `max_failed_share` allows."""
        check_lengths(self.source, len(queries), prompts=prompts, labels=labels)
        if responses is None:
            responses = [_response_of(query, prompt) for query, prompt in zip(queries, prompts)]
        check_lengths(self.source, len(queries), responses=responses)
        return self.rewards([queries, prompts, labels, responses])


class ScoreWorkers(RewardWorkers):
    """Functions in verl's signature; see `ScoreCode`."""

    def __init__(self, code: ScoreCode, settings: RewardSettings) -> None:
        """Start the children; ValueError when the file of `code` cannot be loaded."""
        self._code, self._takes_all = code, code.whole_batches
        # One by one at first: slow responses each have a deadline of their own then, and are not asked for twice.
        self._size = 1
        source = "the reward function" if code.path is None else f"{code.name} in {code.path!r}"
        super().__init__(source, {"path": sys.path, "code": _pickled(code, source)}, settings)

    def __call__(
        self,
        sources: Sequence[str],
        prompts: Sequence[str],
        responses: Sequence[str],
        labels: Sequence[Any],
        extras: Sequence[Any],
    ) -> RewardOutput:
        """Score B responses; what is logged of some of them is NaN of the others. Errors as `rewards`."""
        columns, count = [sources, prompts, responses, labels, extras], len(sources)
        if self._code.whole_batches:
            return self.rewards(columns, count, math.nan)
        began = time.monotonic()
        output = self.rewards(columns, self._size, math.nan)
        if count:
            one_s = (time.monotonic() - began) * self._settings.workers / count
            self._size = max(1, min(MAX_CHUNK, int(CHUNK_S / one_s), math.ceil(count / self._settings.workers)))
        return output


class _Batch:
    """The responses of one call, while the workers share them out."""

    def __init__(self, source: str, columns: list[list[Any]], chunks: list[list[int]], max_failed_share: float) -> None:
        self.parts: list[tuple[list[int], Columns]] = []
        self.failures: dict[int, str] = {}
        self.stopped = False
        self._source = source
        self._columns = columns
        self._todo = deque(chunks)
        self._under_way = 0
        self._max_failed_share = max_failed_share
        self._error: BaseException | None = None
        self._first = ("", "")
        self._changed = threading.Condition()

    def wait(self) -> None:
        """Wait until every response has its reward or has failed; raise what stopped the batch."""
        with self._changed:
            while not self.stopped and (self._todo or self._under_way):
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def take(self) -> list[int] | None:
        """Take the places of the next chunk; None when there is nothing more to do."""
        with self._changed:
            # What is under way elsewhere may fail, and then there are single responses to take.
            while not self.stopped and not self._todo and self._under_way:
                self._changed.wait()
            if self.stopped or not self._todo:
                return None
            self._under_way += 1
            return self._todo.popleft()

    def request(self, chunk: list[int]) -> list[list[Any]]:
        """Cut the columns of a chunk out of the batch's."""
        return [[column[place] for place in chunk] for column in self._columns]

    def done(self, chunk: list[int], columns: Columns) -> None:
        """Keep what a chunk gave."""
        beat()
        with self._changed:
            self.parts.append((chunk, columns))
            self._under_way -= 1
            self._changed.notify_all()

    def failed(self, chunk: list[int], reason: str, trace: str) -> None:
        """Queue a failed chunk again, one response at a time; a single response has failed for good."""
        with self._changed:
            if self.stopped:
                return
            self._under_way -= 1
            if len(chunk) > 1:
                _log.warning(
                    "%s: %s; asking again for each of its %d responses alone", self._source, reason, len(chunk)
                )
                # First in the queue: where everything fails, that is known soonest so.
                self._todo.extendleft([place] for place in reversed(chunk))
            else:
                self._fail(chunk[0], reason, trace)
            self._changed.notify_all()

    def stop(self, error: BaseException | None) -> None:
        """Take nothing more of this batch; whoever waits for it gets `error`."""
        with self._changed:
            self._error = self._error or error
            self.stopped = True
            self._changed.notify_all()

    def _fail(self, place: int, reason: str, trace: str) -> None:
        count, prompt = len(self._columns[0]), self._columns[1][place]
        reason = f"{reason} (response {place}, prompt {short_line(repr(prompt), 80)})"
        if not self.failures:
            self._first = (reason, trace)
        self.failures[place] = reason
        if len(self.failures) <= allowed_failures(count, self._max_failed_share):
            return
        first, trace = self._first
        self.stopped = True
        self._error = RewardError(
            f"{self._source} failed for {len(self.failures)} of {count} responses, more than the allowed share of "
            f"{self._max_failed_share:g}; the first: {first}"
        )
        if trace:
            self._error.add_note(trace)


def _setup(spec: str) -> dict[str, Any]:
    """Say what a child has to load."""
    setup: dict[str, Any] = {"path": sys.path}
    if spec.endswith(".py"):
        return {**setup, "file": str(Path(spec).expanduser().resolve())}
    scorer = _pickled((get_scorer(spec), get_style(spec)), f"the scorer {spec!r}")
    return {**setup, "scorer": scorer, "module": module_of(spec)}


def _pickled(code: object, source: str) -> bytes:
    try:
        return pickle.dumps(code)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{source} cannot be sent to another process ({short_line(str(error))}); register a function "
            "from the top level of a module"
        ) from error


def _response_of(query: str, prompt: str) -> str:
    if not query.startswith(prompt):
        raise ValueError(f"the query {query!r} does not begin with its prompt {prompt!r}; pass responses=... as well")
    return query[len(prompt) :]


# What follows runs in a child.


def _serve(channel: socket.socket) -> None:
    """Load what the first frame names, then reward responses until the parent closes the connection."""
    functions = list[Callable[..., Any]]()

    def reply(message: Any) -> tuple[Any, ...]:
        try:
            if not functions:
                functions.append(_load(message))
                return ("ok",)
            found = functions[0](*message)
            return "ok", found if isinstance(found, Columns) else read_columns(found, len(message[0]))
        except BaseException as error:  # noqa: BLE001 - the user's file may raise anything, SystemExit included
            return "failed", *described(error)

    serve_calls(channel, reply)


def _load(setup: dict[str, Any]) -> Callable[..., Any]:
    """Make a function of the columns out of a scorer, a file or a `ScoreCode`."""
    sys.path[:] = list(dict.fromkeys([*setup["path"], *sys.path]))
    if "code" in setup:
        return load_scores(pickle.loads(setup["code"]))
    if "scorer" in setup:
        scorer, style = pickle.loads(setup["scorer"])
        if setup["module"] is not None:
            # Now, and not within the time that the first responses have.
            importlib.import_module(setup["module"])
        return lambda _queries, _prompts, labels, responses: _scored(scorer, style, responses, labels)
    function = getattr(load_file(Path(setup["file"])), FUNCTION_NAME)
    if not callable(function):
        raise ValueError(f"{FUNCTION_NAME} is a {type(function).__name__}; make it a function")
    if takes_responses(function):
        return lambda queries, prompts, labels, responses: function(queries, prompts, labels, responses=responses)
    return lambda queries, prompts, labels, _responses: function(queries, prompts, labels)


def _scored(scorer: Scorer, style: Style, responses: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
    pairs = [(response, str(label)) for response, label in zip(responses, labels)]
    styles = [style(*pair) for pair in pairs]
    logs = {name: [row[name] for row in styles] for name in styles[0]}
    return {"rewards": [scorer(*pair) for pair in pairs], "extra_logs": logs}


if __name__ == "__main__":
    run_child(_serve)
