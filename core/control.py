"""The side channel of each process: one thread that answers the master while the main thread works.

It carries the user's lines to the terminal, answers "what are you doing, since when, with how much memory", and tells
of a death at once: the operating system closes the connection of a process that is gone.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Status:
    """What a process is doing: the call, since when (seconds since the epoch), and its memory in bytes."""

    doing: str
    since: float
    memory_bytes: int


class ControlServer:
    """The process's end. It listens on `address` for one master that knows the key."""

    def __init__(self, ip: str, key: bytes, status: Callable[[], Status]) -> None:
        self._listener = Listener((ip, 0), authkey=key)
        self.address: Any = self._listener.address
        self._status = status
        self._lock = threading.Lock()
        self._connection: Any = None
        self._waiting: list[str] = []
        threading.Thread(target=self._serve, name="troupe-control", daemon=True).start()

    def say(self, text: str) -> None:
        """Send a line to the terminal; lines said before the master connects are kept for it."""
        with self._lock:
            if self._connection is None:
                self._waiting.append(text)
            else:
                # The master may be gone already; then there is no terminal left to show the line on.
                with contextlib.suppress(OSError):
                    self._connection.send(("say", text))

    def _serve(self) -> None:
        connection = None
        while connection is None:
            # Somebody else may knock at the port; only who knows the key is let in, and no knock ends the channel.
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                connection = self._listener.accept()
        self._listener.close()
        with self._lock:
            self._connection = connection
            for text in self._waiting:
                connection.send(("say", text))
        with contextlib.suppress(EOFError, OSError):
            while connection.recv() == "status":
                status = self._status()
                with self._lock:
                    connection.send(("status", status))


class ControlLink:
    """The master's end of one process's channel."""

    def __init__(self, name: str, address: tuple[str, int], key: bytes) -> None:
        self.name = name
        self.status = Status("starting", time.time(), 0)
        self.alive = True
        self._connection: Any = Client(address, authkey=key)

    def poll(self) -> list[str]:
        """Lines that the process has said since the last time; notices when the process is gone."""
        lines: list[str] = []
        try:
            while self.alive and self._connection.poll():
                kind, payload = self._connection.recv()
                if kind == "say":
                    lines.append(payload)
                else:
                    self.status = payload
        except (EOFError, OSError):
            self.alive = False
        return lines

    def ask_status(self) -> None:
        """Ask what the process is doing; a later `poll` stores the answer in `status`."""
        try:
            self._connection.send("status")
        except OSError:
            self.alive = False

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


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
