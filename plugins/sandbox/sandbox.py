"""Python that a policy wrote, run in a process with limits, on a small machine of its own.

The machine is made of Linux namespaces: the program reads the interpreter and its packages, writes to a file system of
its own in memory, and sees no other file, process, socket or network (sandbox_child.py). docs/security.md describes the
boundary that this is, and what it does not promise. Where the system does not let us make namespaces, nothing is run,
unless TROUPE_SANDBOX=unsafe declares the limits enough: the program runs as the user who trains then, and can read,
write and delete that user's files.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import json
import logging
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from components.process.child_process import cut_text, run_program
from components.ranges import Checked, Count, Seconds
from plugins.sandbox.sandbox_filter import call_filter

CHILD = str(Path(__file__).with_name("sandbox_child.py"))
HOME = "/sandbox"
"""Where a program stands, on its own machine."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/nix/store")
"""What an interpreter needs of the system, beside itself."""
PERMISSION = "TROUPE_SANDBOX"

_PREFIX = "troupe-program-"
_STATUS_BYTES = 100

T = TypeVar("T")

_log = logging.getLogger(__name__)
_places = threading.BoundedSemaphore(max(1, len(os.sched_getaffinity(0))))
"""For programs that run at the same time."""


@dataclass(frozen=True, kw_only=True)
class Limits(Checked):
    """What a program may use. CPU time and memory are those of one process, and it may start others."""

    timeout_s: Seconds = 10.0
    """Seconds on the clock, from when the program begins."""
    cpu_s: Count = 5
    """Seconds of CPU time."""
    memory_bytes: Count = 2**29
    """Of address space."""
    file_bytes: Count = 2**20
    """Of one file that it writes, of its standard output and of its standard error. A program that writes more to the
    last two is ended."""
    max_output: Count = 4000
    """Characters that are kept of standard output, and of standard error."""


class SandboxError(RuntimeError):
    """Programs cannot be run here as they should be."""


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended."""

    stdout: str
    stderr: str
    exit: int
    """Its exit code; below 0 the number of the signal that ended it."""
    reason: str
    """Why it was ended; "" where it ended by itself."""
    is_isolated: bool
    """Whether it had a machine of its own. Without, it has files and network of the user who trains, and what it
    starts in a session of its own may outlive it."""

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

    It runs with `python -I`, with an empty environment, on a machine of its own (see `SandboxResult.is_isolated`), and
    it ends with this process.

    As many programs of this process run at the same time as it may use cores; the others wait, and their limits begin
    afterwards. The time of a tool or a step that waits for them continues: leave it time for that.
    """
    return await in_place(run_now(program, stdin, limits or Limits()))


async def in_place(work: Awaitable[T]) -> T:
    """Do what runs programs, once there is a place for one."""
    # Polled, as the callers may have an event loop each.
    while not _places.acquire(blocking=False):
        await asyncio.sleep(0.01)
    try:
        return await work
    finally:
        _places.release()


async def run_now(
    program: str,
    stdin: str,
    limits: Limits,
    arguments: Sequence[str] = (),
    inherited: Sequence[int] = (),
    started: Callable[[], None] | None = None,
    isolate: bool | None = None,
    until: asyncio.Future[Any] | None = None,
) -> SandboxResult:
    """`run_python_async` without a wait for a place.

    Args:
        program: main.py of the sandbox.
        stdin: what it reads.
        limits: of it.
        arguments: of the interpreter, after `-I`. Default: it runs main.py.
        inherited: descriptors that it has under the same numbers.
        started: called once it has them.
        isolate: give it a machine of its own. Default: where the system lets us.
        until: the program is ended as soon as this is done.
    """
    is_isolated = _can_isolate() if isolate is None else isolate
    with ExitStack() as stack:
        folder = "/" if is_isolated else stack.enter_context(_folder())
        home = HOME if is_isolated else folder
        if not is_isolated:
            Path(folder, "main.py").write_bytes(_encoded(program))
        given, text = (stack.enter_context(_sealed(_encoded(content))) for content in (stdin, program))
        flood = asyncio.get_running_loop().create_future()
        out, err = (stack.enter_context(BoundedPipe(limits.file_bytes, flood)) for _ in range(2))
        status = stack.enter_context(BoundedPipe(_STATUS_BYTES))
        settings = {
            "parent": os.getpid(),
            "isolate": is_isolated,
            "trees": _trees() if is_isolated else [],
            "filter": call_filter(platform.machine()).hex() if is_isolated else "",
            "program": text.fileno(),
            "status": status.writing.fileno(),
            "keep": list(inherited),
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
            "command": [sys.executable, "-I", *(arguments or [f"{home}/main.py"])],
        }
        code = await run_program(
            [sys.executable, "-I", "-S", CHILD, json.dumps(settings)],
            limits.timeout_s,
            started,
            [flood, *([] if until is None else [until])],
            stdin=given,
            stdout=out.writing,
            stderr=err.writing,
            pass_fds=[status.writing.fileno(), text.fileno(), *inherited],
            cwd=folder,
            env={"HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        stdout, stderr = (_shown(pipe.text(), home, limits.max_output) for pipe in (out, err))
        how = status.text().split()
    if code not in (None, -signal.SIGKILL) and not how:
        raise RuntimeError(f"the sandbox could not start a program: {stderr or 'no reason given'}")
    is_late = code is None and not flood.done() and (until is None or not until.done())
    # Nobody was left to say how it ended: it was ended from here, or it has killed its own process group.
    code, used_s = (int(how[0]), float(how[1])) if how else (-signal.SIGKILL, 0.0)
    if flood.done():
        reason = f"ended: it wrote more than {limits.file_bytes} bytes of output"
    elif is_late:
        reason = f"ended: it took more than {limits.timeout_s:g} s"
    elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and used_s >= limits.cpu_s):
        reason = f"ended: it took more than {limits.cpu_s} s of CPU time"
    else:
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else ""
    return SandboxResult(stdout, stderr, code, reason, is_isolated)


class BoundedPipe:
    """A pipe whose other end a program has. At most `limit` bytes of it are kept, and a pipe holds no more than 1 MiB:
    a file would grow at the program's will, by calls that no limit on the size of files covers.

    It is read in the event loop in which it is made.
    """

    def __init__(self, limit: int, overflow: asyncio.Future[Any] | None = None) -> None:
        """
        Args:
            limit: bytes that are kept.
            overflow: done once there are more.
        """
        self.content = bytearray()
        self._limit = limit
        self._overflow = overflow
        self._loop = asyncio.get_running_loop()
        reading, writing = os.pipe()
        self._reading: Any = os.fdopen(reading, "rb", buffering=0)
        self.writing = os.fdopen(writing, "wb", buffering=0)
        """The program's end."""

    def __enter__(self) -> BoundedPipe:
        os.set_blocking(self._reading.fileno(), False)
        self._loop.add_reader(self._reading.fileno(), self.read)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._reading.close()
        self.writing.close()

    def read(self) -> bool:
        """Read what has come, at most 64 KiB; return False where there is nothing now, or never again."""
        part = self._reading.read(2**16)
        if part:
            room = self._limit - len(self.content)
            self.content += part[:room]
            if len(part) <= room:
                return True
            if self._overflow is not None and not self._overflow.done():
                self._overflow.set_result(None)
        if part is not None:
            self._stop()
        return False

    def _stop(self) -> None:
        self._loop.remove_reader(self._reading.fileno())

    def text(self) -> str:
        """All that has been written up to now, as far as it is kept."""
        while self.read():
            pass
        return self.content.decode(errors="replace")


def _sealed(content: bytes) -> IO[bytes]:
    """A file in memory that holds this, and that nobody can change or extend."""
    file = os.fdopen(os.memfd_create("troupe", os.MFD_ALLOW_SEALING), "wb+", buffering=0)
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
    file.seek(0)
    seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


@contextmanager
def _folder() -> Iterator[str]:
    """A folder for one program, without a machine of its own; those that killed processes have left are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as stack:
        while True:
            folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
            stack.enter_context(folder)
            # Before it is locked, another process may take it for one that was left.
            with suppress(OSError):
                stack.enter_context(_locked(Path(folder.name)))
                if Path(folder.name).is_dir():
                    break
        yield folder.name


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which ends with this process.

    Raises:
        OSError: another process holds it, or the folder is not ours.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@functools.cache
def _trees() -> list[str]:
    """Files and folders that a program sees: the interpreter with its packages, and the system's libraries."""
    found = dict.fromkeys([*SYSTEM, *_interpreter()])
    there = [path for path in found if os.path.lexists(path)]
    return [path for path in there if not any(path.startswith(f"{other}/") for other in there)]


def _interpreter() -> Iterator[str]:
    """The trees of this interpreter, and of each symbolic link from its name to itself."""
    yield from (str(Path(path).absolute()) for path in (sys.prefix, sys.base_prefix))
    yield from (str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix))
    link = Path(sys.executable).absolute()
    while link.is_symlink():
        link = link.parent / link.readlink()
        yield os.path.normpath(link.parent.parent)


@functools.cache
def isolation_fault() -> str:
    """Why programs cannot have machines of their own here, and what to do; "" where they can."""
    limits = Limits(timeout_s=60.0, cpu_s=10, memory_bytes=2**30)
    # In a thread: the caller's may have a loop that runs.
    with ThreadPoolExecutor(1) as thread:
        try:
            result = thread.submit(asyncio.run, run_now("pass", "", limits, isolate=True)).result()
            reason = result.text if result.exit else ""
        except RuntimeError as error:
            reason = str(error).strip()
    return f"the system does not let us make namespaces ({reason.splitlines()[-1]})" if reason else ""


def _can_isolate() -> bool:
    fault = isolation_fault()
    if not fault:
        return True
    if os.environ.get(PERMISSION) != "unsafe":
        raise SandboxError(
            f"programs of the policy cannot be kept from the files of this user: {fault}. Run as root, allow "
            f"unprivileged user namespaces, or where these files may be lost set sandbox=unsafe "
            f"(in a script {PERMISSION}=unsafe in the environment)"
        )
    _warn(fault)
    return False


@functools.cache
def _warn(fault: str) -> None:
    _log.warning(
        "programs of the policy run with the files and the network of this user, as %s=unsafe allows: %s",
        PERMISSION,
        fault,
    )


def _shown(text: str, folder: str, most: int) -> str:
    # Its name is another one every time, and would make what the policy reads differ from run to run.
    return cut_text(text.replace(f"{folder}/", "").replace(folder, "."), most)


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")
