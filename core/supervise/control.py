"""Control channel of each process: a thread that replies to the master while the workloads run.

The channel carries log lines to the terminal, status requests (current call, duration, memory), and messages of the
master (stop, replaced workers). It detects the death of either side immediately, because the operating system closes
the connection of a dead process.
"""

import contextlib
import math
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

_GREETING_S = 20
"""Seconds allowed for a connection and for the handshake. A client that exceeds it is disconnected, a server that does
counts as dead."""
_MEMORY_EVERY_S = 2.0
_MEMORY_SHARE = 0.01
"""Maximum share of time spent on reading memory usage (12 ms per GB)."""


_last_beat = 0.0


def beat() -> None:
    """Report progress of this process, which restarts the `stall_timeout`. The cost is negligible."""
    global _last_beat
    _last_beat = time.monotonic()


def seconds_since_beat() -> float:
    """Return the seconds since the last call of `beat`."""
    return time.monotonic() - _last_beat


@dataclass(frozen=True)
class Status:
    """Status of a process: current call, its duration and the time without progress in seconds, and memory in bytes."""

    doing: str
    seconds: float
    quiet: float
    memory_bytes: int


class ControlServer:
    """Server end of the channel, in the worker process. It accepts one master that has the key.

    Args:
        ip: address to listen on. The port is chosen by the system; see `address`.
        key: shared secret of the master and the processes of the run.
        answer: handler of each kind of message. A return value other than None is sent back under the same kind.
        orphaned: callback for the end of the connection to the master.
    """

    def __init__(
        self, ip: str, key: bytes, answer: Mapping[str, Callable[..., Any]], orphaned: Callable[[], None] = lambda: None
    ) -> None:
        self._listener = Listener((ip, 0), family=socket.getaddrinfo(ip, 0)[0][0].name)
        self._key = key
        self.address: Any = self._listener.address[:2]  # an IPv6 address has two more numbers
        self._answer = answer
        self._orphaned = orphaned
        self._lock = threading.Lock()
        self._connection: Any = None
        self._waiting: list[tuple[str, Any]] = []
        threading.Thread(target=self._serve, name="troupe-control", daemon=True).start()

    def send(self, kind: str, payload: Any) -> None:
        """Send the master a message. Messages sent before it connects are queued."""
        with self._lock:
            if self._connection is None:
                self._waiting.append((kind, payload))
            else:
                # The master may have ended already. Then the message has no receiver, and `orphaned` ends this process.
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
            # The master has ended or is unreachable. Nothing else would end this process.
            self._orphaned()

    def _accept(self, masters: "queue.Queue[Any]") -> None:
        """Run the handshake of each connection in its own thread, so that a silent client does not block others."""
        with contextlib.suppress(OSError):  # the listener is closed once the master has connected
            while True:
                connection = self._listener.accept()
                threading.Thread(target=self._greet, args=[connection, masters], daemon=True).start()

    def _greet(self, connection: Any, masters: "queue.Queue[Any]") -> None:
        """Accept a client that has the key. Any other input closes this connection only."""
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
    """Set the timeout of reads from a connection in seconds. 0 disables it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


class ControlLink:
    """Client end of the channel, in the master."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self.status = Status("starting", 0.0, 0.0, 0)
        self.seen = time.monotonic()
        """Time of the last message of the process (time.monotonic)."""
        self.alive = True
        self._unanswered_since = math.inf
        self._connection: Any = Connection(socket.create_connection(address, _GREETING_S).detach())
        os.set_blocking(self._connection.fileno(), True)  # a socket with a timeout does not block
        _set_read_timeout(self._connection, _GREETING_S)
        answer_challenge(self._connection, key)
        deliver_challenge(self._connection, key)
        _set_read_timeout(self._connection, 0)

    def poll(self) -> list[tuple[str, Any]]:
        """Return the messages since the last poll, and detect the end of the process. A status is stored instead."""
        messages: list[tuple[str, Any]] = []
        try:
            while self.alive and self._connection.poll():
                kind, payload = self._connection.recv()
                self.seen = time.monotonic()
                self._unanswered_since = math.inf
                if kind == "status":
                    self.status = payload
                else:
                    messages.append((kind, payload))
        except (EOFError, OSError):
            self.alive = False
        return messages

    @property
    def silent_for(self) -> float:
        """Seconds since the first message after which the process has sent nothing."""
        return max(0.0, time.monotonic() - self._unanswered_since)

    def send(self, kind: str, *details: Any) -> None:
        """Send the process a message. A later `poll` returns the reply."""
        self._unanswered_since = min(self._unanswered_since, time.monotonic())
        try:
            self._connection.send((kind, *details))
        except OSError:
            self.alive = False

    def close(self) -> None:
        """Close the connection."""
        self.alive = False
        self._connection.close()


class MemoryGauge:
    """Proportional set size of this process, cached so that at most 1 % of the time is spent on reading it."""

    def __init__(self, descendants: bool = True) -> None:
        self._descendants = descendants
        self._bytes = 0
        self._read_again_at = 0.0

    def read(self) -> int:
        """Return the size in bytes, cached for 2 s, or for 100 times the duration of a read if that is longer."""
        began = time.monotonic()
        if began >= self._read_again_at:
            self._bytes = memory_bytes(descendants=self._descendants)
            ended = time.monotonic()
            self._read_again_at = ended + max(_MEMORY_EVERY_S, (ended - began) / _MEMORY_SHARE)
        return self._bytes


def memory_bytes(pid: int | str = "self", descendants: bool = True) -> int:
    """Return the proportional set size in bytes of a process (and its descendants). An ended process counts as 0."""
    folder = Path("/proc") / str(pid)
    total = 0
    with contextlib.suppress(OSError):
        rollup = (folder / "smaps_rollup").read_text()
        total = next((int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:")), 0)
        if descendants:
            for children in folder.glob("task/*/children"):
                total += sum(memory_bytes(child) for child in children.read_text().split())
    return total
