"""Child processes for users' code: start, requests, end, and loading of a user's file.

Parent and child exchange frames over a socket pair: 8 bytes of length, then a pickle of plain data. A reply has the
number of its request, and only the child itself sends one. Processes that the user's code forks cannot reply, and bytes
that they write are recognised as foreign. multiprocessing is not used, because it would import the main module of the
parent again.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from components.net.loopback import loopback_variables
from components.process.import_path import with_our_path
from components.process.streams import accept_any_text

LOAD_TIMEOUT_S = 600.0
"""Timeout in seconds for importing the user's file, which may load a model."""
_ROUNDS = 20
"""Maximum number of searches for descendants of a process, which may start new ones between two searches."""
END_TIMEOUT_S = 2.0
"""Seconds within which an idle child should end by itself."""


class Child:
    """Handle of a child process. The child ends with the thread that created it."""

    def __init__(self, module: str, **environment: str) -> None:
        """Start a child process.

        Args:
            module: module to run, which calls `run_child`.
            environment: environment variables in addition to those of this process.
        """
        self._dead = False
        self._number = 0
        self.channel, child_channel = socket.socketpair()
        with child_channel:
            # -P: do not import modules from the working directory, where a file could be called random.py.
            # -u, and stderr for stdout: output of the user's code appears at once, among our own messages.
            # -B: for a file that was changed twice within a second, Python would use outdated bytecode.
            # A process group: descendants can be killed together, and Ctrl-C reaches only this process, which closes
            # the child.
            self._process = subprocess.Popen(
                [sys.executable, "-uPBm", module, str(child_channel.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[child_channel.fileno()],
                env=with_our_path({**os.environ, **loopback_variables(), **environment}),
                process_group=0,
            )

    def request(self, message: object, timeout_s: float) -> Any:
        """Send a message and return the reply.

        By convention the reply is a tuple: "ok" and the results, or "failed", a one-line reason and a traceback. If the
        child does not reply within `timeout_s` seconds, or with a foreign reply, it is killed and "failed" is returned.
        """
        deadline = time.monotonic() + timeout_s
        self._number += 1
        try:
            self.channel.settimeout(timeout_s)
            send(self.channel, (self._number, message))
            return reply_to(self._number, receive(self.channel, deadline))
        except TimeoutError:
            self.kill()
            return "failed", f"no result after {timeout_s:g} s", ""
        except ForeignReplyError as error:
            self.kill()
            return "failed", str(error), ""
        except (EOFError, ConnectionError):
            return "failed", f"the process that ran it ended: {self.wait()}", ""

    def load(self, setup: object, source: str) -> Any:
        """Send the first message, with which the child loads the user's code, and return the first result of the reply.

        Args:
            setup: the message.
            source: name of the code in error messages.

        Raises:
            ValueError: the code cannot be loaded. The child is then ended.
        """
        status, *results = self.request(setup, LOAD_TIMEOUT_S)
        if status == "ok":
            return next(iter(results), None)
        self.kill()
        self.end()
        reason, trace = results
        error = ValueError(f"{source} cannot be loaded: {reason}")
        if trace:
            error.add_note(trace)
        raise error

    def is_dead(self) -> bool:
        """Return True if an idle child has ended."""
        # An idle child sends nothing, so a readable channel means end of file.
        return self._dead or bool(select.select([self.channel], [], [], 0)[0])

    def kill(self) -> None:
        """Kill the child and its descendants. `wait` or `end` must still reap it."""
        self._dead = True
        end_tree(self._process.pid)

    def wait(self) -> str:
        """Wait for the end of the child, for at most END_TIMEOUT_S seconds, and describe it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        code = self._process.returncode
        # The child has closed the channel, and may still be running.
        if code is None:
            return "it closed its connection"
        return exit_reason(code)

    def end(self) -> None:
        """End the child: an idle child by itself, any other by a signal."""
        self.channel.close()
        if not self._dead:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
        self.kill()
        self._process.wait()


def end_tree(pid: int) -> None:
    """Kill a child process that called `keep_orphans`, and all its descendants in any session.

    The child must not be reaped yet, because its process id could belong to another process otherwise.
    """
    with suppress(ProcessLookupError):
        # A stopped process starts no further processes, and still adopts orphans among its descendants.
        os.kill(pid, signal.SIGSTOP)
    end_descendants(pid)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def end_descendants(pid: int) -> None:
    """Kill all descendants of a process that called `keep_orphans`."""
    for _ in range(_ROUNDS):
        descendants = _descendants(pid)
        if not descendants:
            break
        for descendant in descendants:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(descendant, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process, without zombies."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The second field, the name of the program, may contain blanks and parentheses.
            state, parent = file.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(file.parent.name))
    descendants = list(children.get(pid, ()))
    for descendant in descendants:  # the list grows during the loop
        descendants += children.get(descendant, ())
    return descendants


def exit_reason(code: int) -> str:
    """Describe an exit code. A negative one is the number of a signal."""
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


# Frames, for parent and child.


class ForeignReplyError(ValueError):
    """Raised for bytes on the channel that are not the reply to the current request."""


def reply_to(number: int, numbered_reply: Any) -> Any:
    """Return the content of a reply after a check of its number.

    Raises:
        ForeignReplyError: it is not the reply to the request with this number.
    """
    if isinstance(numbered_reply, tuple) and len(numbered_reply) == 2 and numbered_reply[0] == number:
        return numbered_reply[1]
    raise ForeignReplyError("the bytes read are not the reply; does the code write to descriptors it has not opened?")


_LENGTH = struct.Struct("!Q")
"""Length of a frame."""


def frame(message: object) -> bytes:
    """Encode a message as a frame."""
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def send(channel: socket.socket, message: object) -> None:
    """Send a message."""
    channel.sendall(frame(message))


def receive(channel: socket.socket, deadline: float = math.inf) -> Any:
    """Wait for a message.

    Raises:
        EOFError: the other side has closed the channel.
        TimeoutError: `deadline` (of time.monotonic) has passed.
    """
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size, deadline))
    return _loaded(_read(channel, length, deadline))


async def receive_from(reader: asyncio.StreamReader) -> Any:
    """Wait for a message in an event loop.

    Raises:
        EOFError: the other side has closed the channel.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _loaded(await reader.readexactly(length))


def _loaded(body: bytes) -> Any:
    try:
        return pickle.loads(body)
    except Exception as error:
        raise ForeignReplyError(f"the bytes read are not a message ({error}); does the code patch builtins?") from error


def _read(channel: socket.socket, size: int, deadline: float) -> bytes:
    body = bytearray()
    while len(body) < size:
        if deadline < math.inf:
            # At least 1 ms: 0 would make the socket non-blocking, with a different exception.
            channel.settimeout(max(deadline - time.monotonic(), 0.001))
        part = channel.recv(min(size - len(body), 2**20))
        if not part:
            raise EOFError
        body += part
    return bytes(body)


def short_line(text: str, length: int = 300) -> str:
    """Return a text as one line of at most `length` characters, followed by ... if it was longer."""
    joined = " ".join(text.split())
    if len(joined) > length:
        return f"{joined[:length]}..."
    return joined


# The rest of this module runs in a child process.


def described(error: BaseException) -> tuple[str, str]:
    """Return a one-line description of an error, and its traceback."""
    return short_line(f"{type(error).__name__}: {error}"), "".join(traceback.format_exception(error)).rstrip()


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends, even if the user's code hangs."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)
    if os.getppid() != parent:
        # The parent died before prctl, so no signal will come.
        sys.exit(1)


def serve_calls(channel: socket.socket, reply: Callable[[Any], Any]) -> None:
    """Reply to each message until the parent closes the channel. `reply` may raise EOFError to end earlier."""
    server_pid = os.getpid()
    while True:
        number, message = receive(channel)
        result = reply(message)
        end_fork(server_pid)
        send(channel, (number, result))


def end_fork(server_pid: int) -> None:
    """End this process if it is a fork of `server_pid` that the user's code made and returned from."""
    if os.getpid() != server_pid:
        os._exit(0)


def keep_orphans() -> None:
    """Make this process the ancestor of all its descendants, even of those that leave their parent or session."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def run_child(serve: Callable[[socket.socket], None]) -> None:
    """Run as a child process. A module that `Child` starts calls this function and does nothing else."""
    die_with(int(sys.argv[2]))
    keep_orphans()
    accept_any_text()
    with socket.socket(fileno=int(sys.argv[1])) as channel, suppress(EOFError, ConnectionError):
        # Otherwise processes that the user's code starts would keep the connection open.
        channel.set_inheritable(False)
        sys.argv[1:] = []
        serve(channel)
    end_descendants(os.getpid())
