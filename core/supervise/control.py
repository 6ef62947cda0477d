"""The side channel of each process: one thread that answers the master while the workloads work.

It carries the user's lines to the terminal, answers "what are you doing, since when, with how much memory", passes on
what the master has to say (stop, a worker was replaced), and notices a death at once, in both directions: the
operating system closes the connection of a process that is gone.
"""

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

_GREETING_S = 30
"""Who connects and does not show the key in so many seconds is cut off, and who is connected to is taken for dead."""
_MEMORY_EVERY_S = 2.0
_MEMORY_SHARE = 0.01
"""Of the time, at most so much is spent on reading memory, which takes 12 ms for each GB."""


_beaten = 0.0


def beat() -> None:
    """Report that the work of this process makes progress: `stall_timeout` counts from here. It costs nothing."""
    global _beaten
    _beaten = time.monotonic()


def seconds_since_beat() -> float:
    """How long ago the last one was."""
    return time.monotonic() - _beaten


@dataclass(frozen=True)
class Status:
    """What a process is doing: the call, for how many seconds and how many since it made progress, and its memory."""

    doing: str
    seconds: float
    quiet: float
    memory_bytes: int


class ControlServer:
    """The process's end. It listens on `address` for one master that knows the key.

    Args:
        ip: where to listen, on a port of its own.
        key: what the master must know.
        answer: what each kind of message does; what it returns, if anything, is sent back under the same kind.
        orphaned: called when the master is gone.
    """

    def __init__(
        self,
        ip: str,
        key: bytes,
        answer: Mapping[str, Callable[..., Any]],
        orphaned: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener = Listener((ip, 0))
        self._key = key
        self.address: Any = self._listener.address
        self._answer = answer
        self._orphaned = orphaned
        self._lock = threading.Lock()
        self._connection: Any = None
        self._waiting: list[tuple[str, Any]] = []
        threading.Thread(target=self._serve, name="troupe-control", daemon=True).start()

    def send(self, kind: str, payload: Any) -> None:
        """Send the master a message; what is sent before it connects is kept for it."""
        with self._lock:
            if self._connection is None:
                self._waiting.append((kind, payload))
            else:
                # The master may be gone already; then there is nobody left to hear it.
                with contextlib.suppress(OSError):
                    self._connection.send((kind, payload))

    def _serve(self) -> None:
        masters: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._accept, args=[masters], name="troupe-accept", daemon=True).start()
        connection = masters.get()
        self._listener.close()
        with self._lock:
            self._connection = connection
            for message in self._waiting:
                connection.send(message)
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    kind, *details = connection.recv()
                    answer = self._answer[kind](*details)
                    if answer is not None:
                        self.send(kind, answer)
        finally:
            # The master is gone; or it can no longer be heard, which comes to the same.
            self._orphaned()

    def _accept(self, masters: "queue.Queue[Any]") -> None:
        """Greet each who connects in a thread of its own, so that one who says nothing keeps nobody waiting."""
        with contextlib.suppress(OSError):  # closed: the master is there
            while True:
                connection = self._listener.accept()
                threading.Thread(target=self._greet, args=[connection, masters], daemon=True).start()

    def _greet(self, connection: Any, masters: "queue.Queue[Any]") -> None:
        """Let in who knows the key; whatever else comes over the wire ends that connection alone."""
        try:
            _set_read_timeout(connection, _GREETING_S)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            _set_read_timeout(connection, 0)
        except (AuthenticationError, AssertionError, EOFError, OSError):
            connection.close()
        else:
            masters.put(connection)


def _set_read_timeout(connection: Any, seconds: int) -> None:
    """Let a read that waits so long fail; 0: let it wait for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


class ControlLink:
    """The master's end of one process's channel."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self.status = Status("starting", 0.0, 0.0, 0)
        self.seen = time.monotonic()
        """When the process last said anything."""
        self.alive = True
        self._unanswered: float | None = None
        self._connection: Any = Client(address)
        _set_read_timeout(self._connection, _GREETING_S)
        answer_challenge(self._connection, key)
        deliver_challenge(self._connection, key)
        _set_read_timeout(self._connection, 0)

    def poll(self) -> list[tuple[str, Any]]:
        """Messages since the last time, but for the status, which is stored; notices when the process is gone."""
        messages: list[tuple[str, Any]] = []
        try:
            while self.alive and self._connection.poll():
                kind, payload = self._connection.recv()
                self.seen, self._unanswered = time.monotonic(), None
                if kind == "status":
                    self.status = payload
                else:
                    messages.append((kind, payload))
        except (EOFError, OSError):
            self.alive = False
        return messages

    @property
    def silent_for(self) -> float:
        """Seconds since the first message that has found no answer of any kind."""
        return 0.0 if self._unanswered is None else time.monotonic() - self._unanswered

    def send(self, kind: str, *details: Any) -> None:
        """Send the process a message; a later `poll` returns what it answers."""
        if self._unanswered is None:
            self._unanswered = time.monotonic()
        try:
            self._connection.send((kind, *details))
        except OSError:
            self.alive = False

    def close(self) -> None:
        """Hang up."""
        self.alive = False
        self._connection.close()


class MemoryGauge:
    """Proportional set size of this process, read seldom enough to cost next to nothing."""

    def __init__(self, descendants: bool = True) -> None:
        self._descendants = descendants
        self._bytes = 0
        self._read_again_at = 0.0

    def read(self) -> int:
        """Bytes, as of the last two seconds, or of a hundred times as long as reading them takes."""
        began = time.monotonic()
        if began >= self._read_again_at:
            self._bytes = memory_bytes(descendants=self._descendants)
            ended = time.monotonic()
            self._read_again_at = ended + max(_MEMORY_EVERY_S, (ended - began) / _MEMORY_SHARE)
        return self._bytes


def memory_bytes(pid: int | str = "self", descendants: bool = True) -> int:
    """Proportional set size of a process (and its descendants); a process that ended meanwhile counts nothing."""
    folder = Path("/proc") / str(pid)
    total = 0
    with contextlib.suppress(OSError):
        rollup = (folder / "smaps_rollup").read_text()
        total = next((int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0)
        for children in folder.glob("task/*/children") if descendants else ():
            total += sum(memory_bytes(child) for child in children.read_text().split())
    return total
