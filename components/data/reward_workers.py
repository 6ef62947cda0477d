"""Reward code in processes of its own: what hangs or crashes in it costs one answer, and not the run.

    caller -> one thread for each worker -> its child: python -m components.data.reward_workers FD PARENT

A batch is cut into chunks that the workers share out. A chunk that fails is asked for again one answer at a time, so
that the guilty ones are known. A thread owns its child, because Linux sends the signal that ends a child with its
parent when the *thread* that started it ends.

Caller and child exchange frames over a socket pair: 8 bytes of length, then a pickle of plain data. The child is not
made by multiprocessing, which would import the caller's main module again.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import inspect
import logging
import math
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType, TracebackType
from typing import Any

from components.data.rewards import (
    FUNCTION_NAME,
    Columns,
    RewardError,
    RewardOutput,
    RewardSettings,
    check_lengths,
    join_columns,
    read_columns,
)
from components.data.scorers import Scorer, Style, get_scorer, get_style, module_of

PROJECT = Path(__file__).resolve().parents[2]
CHUNKS_PER_WORKER = 4
"""More than one, so that a worker with slow answers does not hold up the others."""
MAX_CHUNK = 64
FEW_FAILURES = 2
"""So many never end a run, unless nobody else was rewarded or none may fail."""
LOAD_TIMEOUT_S = 600.0
"""Seconds for importing the user's file, which may load a model."""
END_TIMEOUT_S = 2.0
"""Seconds that an idle child is given to end by itself."""

_log = logging.getLogger(__name__)


class WorkerReward:
    """A scorer or a user's function, run in child processes. One call at a time uses all of them."""

    def __init__(self, spec: str, settings: RewardSettings) -> None:
        """Start the children; ValueError when the file of `spec` cannot be loaded."""
        self.source = f"{FUNCTION_NAME} in {spec!r}" if spec.endswith(".py") else f"scorer {spec!r}"
        self._settings = settings
        self._setup = _setup(spec)
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._ready: SimpleQueue[Exception | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._children: dict[_Child, _Batch | None] = {}
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

    def __call__(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        *,
        responses: Sequence[str] | None = None,
    ) -> RewardOutput:
        """Reward B sequences; RewardError when more of them fail than `max_failed_share` allows."""
        if self._closed:
            raise RuntimeError(f"{self.source} is closed; open it again")
        count = len(queries)
        check_lengths(self.source, count, prompts=prompts, labels=labels)
        if responses is None:
            responses = [_response_of(query, prompt) for query, prompt in zip(queries, prompts)]
        check_lengths(self.source, count, responses=responses)
        columns = [list(column) for column in (queries, prompts, labels, responses)]
        size = min(MAX_CHUNK, math.ceil(count / (CHUNKS_PER_WORKER * len(self._threads))))
        chunks = [list(range(start, min(start + size, count))) for start in range(0, count, size or 1)]
        batch = _Batch(self.source, columns, chunks, self._settings.max_failed_share)
        for _ in self._threads:
            self._batches.put(batch)
        try:
            batch.wait()
        finally:
            self._abandon(batch)
        return join_columns(self.source, count, batch.parts, batch.failures)

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

    def __enter__(self) -> WorkerReward:
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
        child: _Child | None = None
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

    def _share(self, batch: _Batch, child: _Child) -> _Child:
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
            verdict, *found = self._asked(child, batch.request(chunk), self._settings.timeout_s)
            with self._lock:
                self._children[child] = None
            if verdict == "ok":
                batch.done(chunk, *found)
            else:
                batch.failed(chunk, *found)
        return child

    def _start(self) -> _Child:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self.source} was closed")
            child = _Child()
            self._children[child] = None
        verdict, *found = self._asked(child, self._setup, LOAD_TIMEOUT_S)
        if verdict == "ok":
            return child
        child.kill()
        self._end(child)
        reason, trace = found
        error = ValueError(f"{self.source} cannot be loaded: {reason}")
        if trace:
            error.add_note(trace)
        raise error

    @staticmethod
    def _asked(child: _Child, message: object, timeout_s: float) -> Any:
        """Get a child's answer: "ok" and what it found, or "failed", a line and a traceback. It may be dead then."""
        try:
            return child.ask(message, timeout_s)
        except TimeoutError:
            child.kill()
            return "failed", f"no result after {timeout_s:g} s", ""
        except EOFError:
            return "failed", f"the process that ran it ended: {child.wait()}", ""

    def _end(self, child: _Child) -> None:
        child.end()
        with self._lock:
            self._children.pop(child, None)


class _Batch:
    """The answers of one call, while the workers share them out."""

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
        """Wait until every answer has its reward or has failed; raise what stopped the batch."""
        with self._changed:
            while not self.stopped and (self._todo or self._under_way):
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def take(self) -> list[int] | None:
        """Take the places of the next chunk; None when there is nothing more to do."""
        with self._changed:
            # What is under way elsewhere may fail, and then there are single answers to take.
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
        with self._changed:
            self.parts.append((chunk, columns))
            self._under_way -= 1
            self._changed.notify_all()

    def failed(self, chunk: list[int], reason: str, trace: str) -> None:
        """Queue a failed chunk again, one answer at a time; a single answer has failed for good."""
        with self._changed:
            if self.stopped:
                return
            self._under_way -= 1
            if len(chunk) > 1:
                _log.warning("%s: %s; asking again for each of its %d answers alone", self._source, reason, len(chunk))
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
        reason = f"{reason} (answer {place}, prompt {_short(repr(prompt), 80)})"
        if not self.failures:
            self._first = (reason, trace)
        self.failures[place] = reason
        # 0.29 * 100 is a little below 29. Of a few answers one is a large share, and still says little.
        allowed = self._max_failed_share * count + 1e-9
        if self._max_failed_share > 0 and count > FEW_FAILURES:
            allowed = max(allowed, FEW_FAILURES)
        if len(self.failures) <= allowed:
            return
        first, trace = self._first
        self.stopped = True
        self._error = RewardError(
            f"{self._source} failed for {len(self.failures)} of {count} answers, more than the allowed share of "
            f"{self._max_failed_share:g}; the first: {first}"
        )
        if trace:
            self._error.add_note(trace)


class _Child:
    """One process that runs reward code, as its owner sees it."""

    def __init__(self) -> None:
        self._dead = False
        self._channel, theirs = socket.socketpair()
        paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            # -P: a folder called components, or a random.py, where the caller happens to stand is not ours.
            # -u, and stderr for stdout: what the user's code prints is seen at once, among our own messages.
            # -B: bytecode of a file that was changed twice within a second would be taken for the new one's.
            # A process group: what the child has started ends with it, and Ctrl-C reaches us alone, who close it.
            self._process = subprocess.Popen(
                [sys.executable, "-uPBm", "components.data.reward_workers", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                process_group=0,
            )

    def ask(self, message: object, timeout_s: float) -> Any:
        """Send a message and wait for its answer; TimeoutError, or EOFError when the child has died."""
        deadline = time.monotonic() + timeout_s
        try:
            self._channel.settimeout(timeout_s)
            _send(self._channel, message)
            return _receive(self._channel, deadline)
        except ConnectionError as error:
            raise EOFError from error

    def is_dead(self) -> bool:
        """Tell whether an idle child is gone: it says nothing unasked, so all that can be read is the end."""
        return self._dead or bool(select.select([self._channel], [], [], 0)[0])

    def kill(self) -> None:
        """End it and what it has started; it stays for `wait` or `end` to collect."""
        self._dead = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> str:
        """Say how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        code = self._process.returncode
        if code is None:
            return "it closed its connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def end(self) -> None:
        """Let it end by itself if it is idle, and make sure that it does."""
        self._channel.close()
        if not self._dead:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
        self.kill()
        self._process.wait()


def _setup(spec: str) -> dict[str, Any]:
    """Say what a child has to load."""
    setup: dict[str, Any] = {"path": sys.path}
    if spec.endswith(".py"):
        return {**setup, "file": str(Path(spec).expanduser().resolve())}
    try:
        scorer = pickle.dumps((get_scorer(spec), get_style(spec)))
        return {**setup, "scorer": scorer, "module": module_of(spec)}
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the scorer {spec!r} cannot be sent to another process ({_short(str(error))}); register a function from "
            "the top level of a module"
        ) from error


def _response_of(query: str, prompt: str) -> str:
    if not query.startswith(prompt):
        raise ValueError(f"the query {query!r} does not begin with its prompt {prompt!r}; pass responses=... as well")
    return query[len(prompt) :]


def _short(text: str, length: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[:length]}..."


# Frames, for both sides.

_LENGTH = struct.Struct("!Q")


def _send(channel: socket.socket, message: object) -> None:
    body = pickle.dumps(message)
    channel.sendall(_LENGTH.pack(len(body)) + body)


def _receive(channel: socket.socket, deadline: float = math.inf) -> Any:
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size, deadline))
    return pickle.loads(_read(channel, length, deadline))


def _read(channel: socket.socket, size: int, deadline: float) -> bytes:
    body = bytearray()
    while len(body) < size:
        if deadline < math.inf:
            # 0 would mean: do not wait at all, and raise something else.
            channel.settimeout(max(deadline - time.monotonic(), 0.001))
        part = channel.recv(min(size - len(body), 2**20))
        if not part:
            raise EOFError
        body += part
    return bytes(body)


# What follows runs in a child.


def _serve(channel: socket.socket) -> None:
    """Load what the first frame names, then answer requests until the parent closes the connection."""
    try:
        function = _load(_receive(channel))
    except BaseException as error:  # noqa: BLE001 - the user's file may raise anything, SystemExit included
        _send(channel, ("failed", *_described(error)))
        return
    _send(channel, ("ok",))
    while True:
        request = _receive(channel)
        try:
            reply = ("ok", read_columns(function(*request), len(request[0])))
        except BaseException as error:  # noqa: BLE001 - as above
            reply = ("failed", *_described(error))
        _send(channel, reply)


def _load(setup: dict[str, Any]) -> Callable[..., Any]:
    """Make a function of queries, prompts, labels and responses out of a scorer or a file."""
    sys.path[:] = list(dict.fromkeys([*setup["path"], *sys.path]))
    if "scorer" in setup:
        scorer, style = pickle.loads(setup["scorer"])
        if setup["module"] is not None:
            # Now, and not within the time that the first answers have.
            importlib.import_module(setup["module"])
        return lambda _queries, _prompts, labels, responses: _scored(scorer, style, responses, labels)
    function = getattr(_load_file(Path(setup["file"])), FUNCTION_NAME)
    if not callable(function):
        raise ValueError(f"{FUNCTION_NAME} is a {type(function).__name__}; make it a function")
    parameters = inspect.signature(function).parameters
    if "responses" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return lambda queries, prompts, labels, responses: function(queries, prompts, labels, responses=responses)
    return lambda queries, prompts, labels, _responses: function(queries, prompts, labels)


def _scored(scorer: Scorer, style: Style, responses: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
    pairs = [(response, str(label)) for response, label in zip(responses, labels)]
    styles = [style(*pair) for pair in pairs]
    logs = {name: [row[name] for row in styles] for name in styles[0]}
    return {"rewards": [scorer(*pair) for pair in pairs], "extra_logs": logs}


def _load_file(path: Path) -> ModuleType:
    # The name is made from the path: no installed package is called like this.
    name = f"troupe_reward_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look their module up here while the file still runs.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _described(error: BaseException) -> tuple[str, str]:
    """One line, and the whole traceback."""
    return _short(f"{type(error).__name__}: {error}"), "".join(traceback.format_exception(error)).rstrip()


def die_with(parent: int) -> None:
    """Have the kernel end this process with its parent, even while it is stuck in the user's code."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        # It died before it could be asked for.
        sys.exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as _channel, suppress(EOFError, ConnectionError):
        # What the user's code starts must not hold the connection open.
        _channel.set_inheritable(False)
        sys.argv[1:] = []
        _serve(_channel)
