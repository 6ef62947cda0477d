"""Python that a policy wrote, run in a process with limits.

This is no security boundary. The program runs as the user who trains: it can read that user's files, and write or
delete them. The limits are there so that a careless program does not take a run down with it; for a hostile one use a
container or a machine of its own.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from components.data.child_process import run_program

CHILD = str(Path(__file__).with_name("sandbox_child.py"))
PROBE = [sys.executable, "-I", "-S", CHILD, "probe"]

_log = logging.getLogger(__name__)
_places = threading.BoundedSemaphore(max(1, len(os.sched_getaffinity(0))))
"""For programs that run at the same time."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use. CPU time and memory are those of one process, and it may start others."""

    timeout_s: float = 10.0
    """Seconds on the clock, from when the program begins."""
    cpu_s: int = 5
    """Seconds of CPU time."""
    memory_bytes: int = 2**29
    """Of address space."""
    file_bytes: int = 2**20
    """Of one file that it writes; standard output and error are such files."""
    max_output: int = 4000
    """Characters that are kept of standard output, and of standard error."""

    def __post_init__(self) -> None:
        for name in ("cpu_s", "memory_bytes", "file_bytes", "max_output"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; set it to at least 1")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s}; set a number of seconds above 0")


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended."""

    stdout: str
    stderr: str
    exit: int
    """Its exit code; below 0 the number of the signal that ended it."""
    reason: str
    """Why it was ended; "" where it ended by itself."""
    is_cut: bool
    """Whether it had no network, and its processes could not outlive it. Where the system does not let us make
    namespaces, what it starts in a session of its own may."""

    @property
    def text(self) -> str:
        """All of it, as somebody reads it who has written the program."""
        parts = [self.stdout, self.stderr, self.reason]
        if self.exit and not self.reason and not self.stderr:
            parts.append(f"exit code {self.exit}")
        return "\n".join(part.rstrip("\n") for part in parts if part)


def run_python(program: str, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
    """`run_python_async` for code without an event loop, such as a reward function's."""
    return asyncio.run(run_python_async(program, stdin, limits))


async def run_python_async(program: str, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
    """Run a program to its end, or to that of its limits; nothing of it is left then.

    It runs with `python -I` in a folder of its own, with an empty environment, without a network (where the system
    lets us; see `SandboxResult.is_cut`), and it ends with this process. Root may start any number of processes.

    As many programs of this process run at the same time as it may use cores; the others wait, and their limits begin
    afterwards. The time of a tool or a step that waits for them continues: leave it room for that.
    """
    # Polled, as the callers may have an event loop each.
    while not _places.acquire(blocking=False):
        await asyncio.sleep(0.01)
    try:
        return await _run(program, stdin, limits or Limits())
    finally:
        _places.release()


async def _run(program: str, stdin: str, limits: Limits) -> SandboxResult:
    is_cut = _can_cut()
    with tempfile.TemporaryDirectory(prefix="troupe-sandbox-", ignore_cleanup_errors=True) as folder:
        file = Path(folder, "main.py")
        file.write_bytes(_encoded(program))
        with ExitStack() as files:
            # Files, and not pipes: a program that writes without end meets file_bytes, and our memory never holds more.
            given, out, err, status = (files.enter_context(tempfile.TemporaryFile()) for _ in range(4))
            given.write(_encoded(stdin))
            given.seek(0)
            numbers = (os.getpid(), int(is_cut), limits.cpu_s, limits.memory_bytes, limits.file_bytes, status.fileno())
            code = await run_program(
                [sys.executable, "-I", "-S", CHILD, *map(str, numbers), sys.executable, "-I", str(file)],
                limits.timeout_s,
                stdin=given,
                stdout=out,
                stderr=err,
                pass_fds=[status.fileno()],
                cwd=folder,
                env={"HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
            stdout, stderr = (_shown(_read(each, limits.file_bytes), folder, limits.max_output) for each in (out, err))
            how = _read(status, 100).split()
    is_late = code is None
    if code not in (None, -signal.SIGKILL) and not how:
        raise RuntimeError(f"the sandbox could not start a program: {stderr or 'no reason given'}")
    # Nobody was left to say how it ended: the time was up, or it has killed its own process group.
    code, used_s = (int(how[0]), float(how[1])) if how else (-signal.SIGKILL, 0.0)
    if is_late:
        reason = f"ended: it took more than {limits.timeout_s:g} s"
    elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and used_s >= limits.cpu_s):
        reason = f"ended: it took more than {limits.cpu_s} s of CPU time"
    else:
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else ""
    return SandboxResult(stdout, stderr, code, reason, is_cut)


@functools.cache
def _can_cut() -> bool:
    is_allowed = subprocess.run(PROBE, check=False).returncode == 0
    if not is_allowed:
        _log.warning(
            "programs of the policy run with the network of this machine: the system does not let us make namespaces "
            "(unshare); run as root, or allow unprivileged user namespaces"
        )
    return is_allowed


def _read(file: IO[bytes], most: int) -> str:
    file.seek(0)
    return file.read(most).decode(errors="replace")


def _shown(text: str, folder: str, most: int) -> str:
    # Its name is another one every time, and would make what the policy reads differ from run to run.
    return cut(text.replace(f"{folder}/", "").replace(folder, "."), most)


def cut(text: str, most: int) -> str:
    """The first so many characters, and where there are more a line that says so."""
    return text if len(text) <= most else f"{text[:most]}\n... ({len(text)} characters, cut after {most})"


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")
