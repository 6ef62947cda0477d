"""Reward code in processes of its own: what hangs or crashes in it costs one response, and not the run.

    caller -> one thread for each worker -> its child: python -m components.data.reward_workers FD PARENT

A batch is cut into chunks that the workers share out. A chunk that fails is asked for again one response at a time, so
that the guilty ones are known. Not a pool of pebble's or loky's: a chunk is one task there, while here each of its
responses has a deadline, and the child inherits neither descriptors nor modules of the run.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from components.data.child_process import Child, described, load_file, run_child, serve_calls, short_line
from components.data.reward_functions import by_names, read_rewards
from components.data.rewards import (
    Closing,
    Columns,
    RewardError,
    RewardOutput,
    RewardSettings,
    check_lengths,
    is_reward_file,
    join_columns,
    reward_function,
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


class RewardWorkers(Closing):
    """Reward code in child processes. One call at a time uses all of them."""

    _takes_all = False
    """Whether one call gets all responses of a batch, and the time of all of them."""
    _may_be_absent = False
    """Whether a response without a reward, None, is no failure: another part of a sum has one."""

    def __init__(self, source: str, load: Callable[[], Callable[..., Any]], settings: RewardSettings) -> None:
        """Start the children.

        Args:
            source: what errors call the code.
            load: gives the function of columns, in the child.
            settings: how it is run.

        Raises:
            ValueError: it cannot be loaded, or cannot be sent to another process.
        """
        try:
            setup = {"path": sys.path, "load": pickle.dumps(load)}
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{source} cannot be sent to another process ({short_line(str(error))}); register a function "
                "from the top level of a module"
            ) from error
        self.source = source
        self._settings = settings
        self._closed = False
        self._workers = [_Worker(source, setup) for _ in range(settings.workers)]
        try:
            for worker in self._workers:
                worker.task.result()
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
        size = size or min(MAX_CHUNK, math.ceil(count / (CHUNKS_PER_WORKER * len(self._workers))))
        todo = deque(list(range(start, min(start + size, count))) for start in range(0, count, size or 1))
        parts: list[tuple[list[int], Columns]] = []
        failures: dict[int, tuple[str, str]] = {}
        idle = list(self._workers)
        busy: dict[Future[Any], tuple[_Worker, list[int]]] = {}
        try:
            while todo or busy:
                while todo and idle:
                    chunk, worker = todo.popleft(), idle.pop()
                    message = [[column[place] for place in chunk] for column in columns]
                    timeout_s = self._settings.timeout_s * (len(chunk) if self._takes_all else 1)
                    busy[worker.ask(message, timeout_s)] = worker, chunk
                for task in wait(busy, return_when=FIRST_COMPLETED).done:
                    worker, chunk = busy.pop(task)
                    idle.append(worker)
                    if self._closed:
                        raise RuntimeError(f"{self.source} was closed")
                    verdict, *found = task.result()
                    if verdict == "ok":
                        beat()
                        parts.append((chunk, *found))
                        for place in () if self._may_be_absent else found[0].absent:
                            self._fail(chunk[place], columns, failures, "it returned None", "")
                    elif len(chunk) > 1:
                        again = f"asking again for each of its {len(chunk)} responses alone"
                        _log.warning("%s: %s; %s", self.source, found[0], again)
                        # First in the queue: where everything fails, that is known soonest so.
                        todo.extendleft([place] for place in reversed(chunk))
                    else:
                        self._fail(chunk[0], columns, failures, *found)
        finally:
            for worker, _ in busy.values():
                worker.interrupt()
        reasons = {place: reason for place, (reason, _) in failures.items()}
        return join_columns(self.source, count, parts, reasons, missing)

    def close(self) -> None:
        """End all children, busy or not."""
        self._closed = True
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.join()

    def _fail(
        self, place: int, columns: list[list[Any]], failures: dict[int, tuple[str, str]], reason: str, trace: str
    ) -> None:
        """Note that a response has no reward; RewardError when it is one too many."""
        count, prompt = len(columns[0]), columns[1][place]
        failures[place] = f"{reason} (response {place}, prompt {short_line(repr(prompt), 80)})", trace
        if len(failures) <= allowed_failures(count, self._settings.max_failed_share):
            return
        first, trace = next(iter(failures.values()))
        error = RewardError(
            f"{self.source} failed for {len(failures)} of {count} responses, more than the allowed share of "
            f"{self._settings.max_failed_share:g}; the first: {first}"
        )
        if trace:
            error.add_note(trace)
        raise error


class _Worker:
    """A child process, and the thread that owns it: Linux ends a child with the thread that has started it."""

    def __init__(self, source: str, setup: dict[str, Any]) -> None:
        self._source = source
        self._setup = setup
        self._child: Child | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1)
        self.task: Future[Any] = self._thread.submit(self._start)
        """What it does, or has done last."""

    def ask(self, message: object, timeout_s: float) -> Future[Any]:
        """Have the child do something; gives what `Child.verdict` does. One that is gone is replaced before."""
        self.task = self._thread.submit(self._ask, message, timeout_s)
        return self.task

    def interrupt(self) -> None:
        """End the child if it is busy."""
        with self._lock:
            if self._child is not None and not self.task.done():
                self._child.kill()

    def close(self) -> None:
        """Begin to end the child, which `join` waits for."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        self.interrupt()
        if not was_closed:
            self._thread.submit(self._end)

    def join(self) -> None:
        self._thread.shutdown()

    def _ask(self, message: object, timeout_s: float) -> Any:
        if self._child is not None and self._child.is_dead():
            self._end()
        child = self._child or self._start()
        return child.verdict(message, timeout_s)

    def _start(self) -> Child:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._source} was closed")
            self._child = child = Child("components.data.reward_workers")
        try:
            child.load(self._setup, self._source)
        except ValueError:
            self._child = None
            raise
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class WorkerReward(RewardWorkers):
    """A scorer, or a function of a user's file."""

    def __init__(self, spec: str, settings: RewardSettings, *, in_sum: bool = False) -> None:
        """Start the children; ValueError when the file of `spec` cannot be loaded."""
        self._may_be_absent, self._is_file = in_sum, is_reward_file(spec)
        if self._is_file:
            path, name = reward_function(spec)
            source, load = f"{name} in {str(path)!r}", partial(_load_file, path, name)
        else:
            source, load = f"scorer {spec!r}", partial(_load_scorer, get_scorer(spec), get_style(spec), module_of(spec))
        super().__init__(source, load, settings)

    def __call__(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> RewardOutput:
        """Reward B sequences; RewardError when more of them fail than `max_failed_share` allows."""
        check_lengths(self.source, len(queries), prompts=prompts, labels=labels)
        if responses is None:
            responses = [_response_of(query, prompt) for query, prompt in zip(queries, prompts)]
        check_lengths(self.source, len(queries), responses=responses)
        columns: list[Sequence[Any]] = [queries, prompts, labels, responses]
        if self._is_file:
            rows = [{}] * len(queries) if rows is None else rows
            check_lengths(self.source, len(queries), rows=rows)
            columns.append(rows)
        return self.rewards(columns)


class ScoreWorkers(RewardWorkers):
    """Functions in verl's signature; see `ScoreCode`."""

    def __init__(self, code: ScoreCode, settings: RewardSettings) -> None:
        """Start the children; ValueError when the file of `code` cannot be loaded."""
        self._code, self._takes_all = code, code.whole_batches
        # One by one at first: slow responses each have a deadline of their own then, and are not asked for twice.
        self._size = 1
        source = "the reward function" if code.path is None else f"{code.name} in {code.path!r}"
        super().__init__(source, partial(load_scores, code), settings)

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
                sys.path[:] = list(dict.fromkeys([*message["path"], *sys.path]))
                functions.append(pickle.loads(message["load"])())
                return ("ok",)
            found = functions[0](*message)
            return "ok", found if isinstance(found, Columns) else read_rewards(found, len(message[0]))
        except BaseException as error:  # noqa: BLE001 - the user's file may raise anything, SystemExit included
            return "failed", *described(error)

    serve_calls(channel, reply)


def _load_file(path: Path, name: str) -> Callable[..., Any]:
    function = getattr(load_file(path), name)
    if not callable(function):
        raise ValueError(f"{name} is a {type(function).__name__}; make it a function")
    return by_names(function)


def _load_scorer(scorer: Scorer, style: Style, module: str | None) -> Callable[..., Any]:
    if module is not None:
        # Now, and not within the time that the first responses have.
        importlib.import_module(module)
    return partial(_scored, scorer, style)


def _scored(scorer: Scorer, style: Style, *columns: Sequence[Any]) -> dict[str, Any]:
    _, _, labels, responses = columns
    pairs = [(response, str(label)) for response, label in zip(responses, labels)]
    styles = [style(*pair) for pair in pairs]
    logs = {name: [row[name] for row in styles] for name in styles[0]}
    return {"rewards": [scorer(*pair) for pair in pairs], "extra_logs": logs}


if __name__ == "__main__":
    run_child(_serve)
