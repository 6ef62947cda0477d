"""Users' code in processes of its own: how they are started, spoken to and ended, and how a file is loaded.

Caller and child exchange frames over a socket pair: 8 bytes of length, then a pickle of plain data. A reply has the
number of its request, and only the process that was asked sends one: what the user's code forks, and what that writes,
is not taken for another's reply. The child is not made by multiprocessing, which would import the caller's main module
again.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import importlib.util
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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from components.net.loopback import loopback_variables
from components.process.import_path import import_path
from components.process.streams import accept_any_text

LOAD_TIMEOUT_S = 600.0
"""Seconds for importing the user's file, which may load a model."""
_ROUNDS = 20
"""Searches for what a process has started: between two of them what was found may have started more."""
END_TIMEOUT_S = 2.0
"""Seconds that an idle child is given to end by itself."""


class Child:
    """One process, as its owner sees it; it lives no longer than the thread that made it."""

    def __init__(self, module: str, **environment: str) -> None:
        """Start `module`, which calls `run_child`, with these variables besides those of this process."""
        self._dead = False
        self._number = 0
        self.channel, theirs = socket.socketpair()
        with theirs:
            # -P: a folder called components, or a random.py, where the caller happens to stand is not ours.
            # -u, and stderr for stdout: what the user's code prints is seen at once, among our own messages.
            # -B: bytecode of a file that was changed twice within a second would be taken for the new one's.
            # A process group: what the child has started ends with it, and Ctrl-C reaches us alone, who close it.
            self._process = subprocess.Popen(
                [sys.executable, "-uPBm", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env=with_our_path({**os.environ, **loopback_variables(), **environment}),
                process_group=0,
            )

    def request(self, message: object, timeout_s: float) -> Any:
        """Send a message and return the reply, by convention a tuple: "ok" and the results, or "failed", the reason in
        one line and a traceback.

        A child that does not reply in time, or with another's reply, is killed, and "failed" is returned.
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

    def load(self, setup: object, what: str) -> Any:
        """Have a child load what it is for and return what it replies; ValueError, and the child is ended, when it
        cannot.
        """
        status, *results = self.request(setup, LOAD_TIMEOUT_S)
        if status == "ok":
            return results[0] if results else None
        self.kill()
        self.end()
        reason, trace = results
        error = ValueError(f"{what} cannot be loaded: {reason}")
        if trace:
            error.add_note(trace)
        raise error

    def is_dead(self) -> bool:
        """Tell whether an idle child is gone: it says nothing unasked, so all that can be read is the end."""
        return self._dead or bool(select.select([self.channel], [], [], 0)[0])

    def kill(self) -> None:
        """End it and what it has started; it stays for `wait` or `end` to collect."""
        self._dead = True
        end_tree(self._process.pid)

    def wait(self) -> str:
        """Say how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        code = self._process.returncode
        if code is None:
            return "it closed its connection"
        return exit_reason(code)

    def end(self) -> None:
        """Let it end by itself if it is idle, and make sure that it does."""
        self.channel.close()
        if not self._dead:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
        self.kill()
        self._process.wait()


def with_our_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a Python that finds our modules before all others, wherever it is started."""
    return {**environment, "PYTHONPATH": import_path(environment.get("PYTHONPATH"))}


async def run_program(
    command: Sequence[str],
    limit_s: float | None = None,
    started: Callable[[], None] | None = None,
    until: Collection[asyncio.Future[Any]] = (),
    **options: Any,
) -> int | None:
    """Run a program in a process group of its own, and end what is left of that, also when nobody waits any more.

    Args:
        command: the program and its arguments.
        limit_s: seconds that it may take.
        started: called once it runs.
        until: the program is ended as soon as one of these is done.
        options: as `asyncio.create_subprocess_exec` takes them.

    Returns:
        Its exit code, below 0 the number of the signal that ended it; None: it took longer, or `until` ended it.
    """
    program = await asyncio.create_subprocess_exec(*command, start_new_session=True, **options)
    try:
        if started is not None:
            started()
        ends = {asyncio.ensure_future(program.wait()), *until}
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        return program.returncode
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        await asyncio.shield(program.wait())


def end_tree(pid: int) -> None:
    """End a process of ours that `keep_orphans`, with all that it has started, in whatever session. It is not yet
    collected, so the number still means it.
    """
    with suppress(ProcessLookupError):
        # It starts nothing more, and takes in whatever loses its parent meanwhile.
        os.kill(pid, signal.SIGSTOP)
    end_descendants(pid)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def end_descendants(pid: int) -> None:
    """End all that a process has started that `keep_orphans`."""
    for _ in range(_ROUNDS):
        descendants = _descendants(pid)
        if not descendants:
            break
        for descendant in descendants:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(descendant, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Living processes that a process has started, and that these have."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = file.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(file.parent.name))
    found = list(children.get(pid, ()))
    for descendant in found:
        found += children.get(descendant, ())
    return found


def exit_reason(code: int) -> str:
    """Say what an exit code means; below 0 it is a signal's."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# Frames, for both sides.


class ForeignReplyError(ValueError):
    """What was read is no reply to what was asked."""


def reply_to(number: int, numbered: Any) -> Any:
    """What a reply holds, once it is known for the one to this request.

    Raises:
        ForeignReplyError: it is another's.
    """
    if isinstance(numbered, tuple) and len(numbered) == 2 and numbered[0] == number:
        return numbered[1]
    raise ForeignReplyError(
        "what was read is no reply to this request; does the code write to descriptors that it has not opened?"
    )


_LENGTH = struct.Struct("!Q")


def frame(message: object) -> bytes:
    """Write a message the way it crosses."""
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def send(channel: socket.socket, message: object) -> None:
    """Send a message."""
    channel.sendall(frame(message))


def receive(channel: socket.socket, deadline: float = math.inf) -> Any:
    """Wait for a message; EOFError when the other side has closed, TimeoutError past `deadline` (time.monotonic)."""
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size, deadline))
    return _loaded(_read(channel, length, deadline))


async def receive_from(reader: asyncio.StreamReader) -> Any:
    """Wait for a message where others are waited for too; EOFError when the other side has closed."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _loaded(await reader.readexactly(length))


def _loaded(body: bytes) -> Any:
    try:
        return pickle.loads(body)
    except Exception as error:
        raise ForeignReplyError(f"what was read is no message ({error}); does the code patch builtins?") from error


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


def load_file(path: Path) -> ModuleType:
    """Run a file as a module, under the same name in every process."""
    # The name is made from the path: no installed package is called like this.
    name = f"troupe_file_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look their module up here while the file still runs.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def short_line(text: str, length: int = 300) -> str:
    """One line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[:length]}..."


def cut_text(text: str, length: int) -> str:
    """Return the first `length` characters, and a line that notes it if there are more."""
    return text if len(text) <= length else f"{text[:length]}\n... ({len(text)} characters, cut after {length})"


# What follows runs in a child.


def described(error: BaseException) -> tuple[str, str]:
    """One line, and the whole traceback."""
    return short_line(f"{type(error).__name__}: {error}"), "".join(traceback.format_exception(error)).rstrip()


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, even while it is stuck in the user's code."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, by)
    if os.getppid() != parent:
        # It died before it could be asked for.
        sys.exit(1)


def serve_calls(channel: socket.socket, reply: Callable[[Any], Any]) -> None:
    """Reply to each message until the owner closes the connection. `reply` may raise EOFError to end this earlier."""
    this = os.getpid()
    while True:
        number, message = receive(channel)
        found = reply(message)
        end_fork(this)
        send(channel, (number, found))


def end_fork(this: int) -> None:
    """End a process that the user's code has forked from the process `this`, and that has come back from it."""
    if os.getpid() != this:
        os._exit(0)


def keep_orphans() -> None:
    """Stay the ancestor of all that is started from here, also of what leaves its parent and its session."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def run_child(serve: Callable[[socket.socket], None]) -> None:
    """Be a child: all that a module does that `Child` starts."""
    die_with(int(sys.argv[2]))
    keep_orphans()
    accept_any_text()
    with socket.socket(fileno=int(sys.argv[1])) as channel, suppress(EOFError, ConnectionError):
        # What the user's code starts must not hold the connection open.
        channel.set_inheritable(False)
        sys.argv[1:] = []
        serve(channel)
    end_descendants(os.getpid())
