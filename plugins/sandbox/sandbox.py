"""Run Python that a policy wrote, in an isolated process with limits.

The isolation consists of Linux namespaces. The program can read the interpreter and its packages, writes to a private
file system in memory, and sees no other file, process, socket or network (sandbox_child.py). docs/security.md describes
this boundary and its limits. If the system does not allow namespaces, no program is run, unless TROUPE_SANDBOX=unsafe
declares the process limits sufficient. The program then runs as the user who trains, and can read, write and delete
that user's files.
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

from components.process.programs import cut_text, run_program
from components.ranges import Checked, Count, Seconds
from plugins.sandbox.sandbox_filter import call_filter

CHILD = str(Path(__file__).with_name("sandbox_child.py"))
HOME = "/sandbox"
"""Working directory of an isolated program."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/nix/store")
"""Files and folders of the system that an interpreter needs."""
PERMISSION = "TROUPE_SANDBOX"

_PREFIX = "troupe-program-"
_STATUS_BYTES = 100

T = TypeVar("T")

_log = logging.getLogger(__name__)
_places = threading.BoundedSemaphore(max(1, len(os.sched_getaffinity(0))))
"""Slots for programs that run at the same time, one per core."""


@dataclass(frozen=True, kw_only=True)
class Limits(Checked):
    """Resource limits of a program. CPU time and memory are limits per process, and a program may start others."""

    timeout_s: Seconds = 10.0
    """Maximum number of seconds of wall time from the start of the program."""
    cpu_s: Count = 5
    """Maximum number of seconds of CPU time."""
    memory_bytes: Count = 2**29
    """Maximum address space in bytes."""
    file_bytes: Count = 2**20
    """Maximum number of bytes in one file, on standard output, and on standard error. A program that exceeds one of the
    last two is ended."""
    max_output: Count = 4000
    """Maximum number of characters that are kept of standard output, and of standard error."""


class SandboxError(RuntimeError):
    """Raised if programs cannot be isolated on this machine."""


@dataclass(frozen=True)
class SandboxResult:
    """Result of a program."""

    stdout: str
    stderr: str
    exit: int
    """Exit code of the program, or minus the number of the signal that ended it."""
    reason: str
    """Reason for which the program was ended, or "" if it ended by itself."""
    is_isolated: bool
    """True if the program was isolated. Otherwise it had the files and the network of the user who trains, and
    processes that it started in a new session may outlive it."""

    @property
    def text(self) -> str:
        """Output, errors and reason as one text, for the author of the program."""
        parts = [self.stdout, self.stderr, self.reason]
        if self.exit and not self.reason and not self.stderr:
            parts.append(f"exit code {self.exit}")
        return "\n".join(part.rstrip("\n") for part in parts if part)


def run_python(program: str, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
    """Run `run_python_async` in code without an event loop, such as a reward function."""
    return asyncio.run(run_python_async(program, stdin, limits))


async def run_python_async(program: str, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
    """Run a program until it ends or exceeds a limit. Afterwards none of its processes is left.

    It runs with `python -I` and an empty environment, isolated (see `SandboxResult.is_isolated`). It is killed if this
    process ends.

    At the same time run as many programs of this process as it has cores. Other programs wait, and their limits begin
    afterwards. The timeout of a tool or a step includes this wait, so it needs a margin.
    """
    return await in_place(run_now(program, stdin, limits or Limits()))


async def in_place(work: Awaitable[T]) -> T:
    """Await `work`, which runs a program, once a slot is free."""
    # Polled, because callers may have different event loops.
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
    """Run `run_python_async` without waiting for a free slot.

    Args:
        program: contents of main.py in the sandbox.
        stdin: standard input of the program.
        limits: limits of the program.
        arguments: arguments of the interpreter after `-I`. Default: main.py.
        inherited: file descriptors that the program gets, with the same numbers.
        started: called once the program has them.
        isolate: True to isolate the program. Default: if the system allows it.
        until: the program is ended as soon as this future is done.
    """
    is_isolated = _can_isolate() if isolate is None else isolate
    with ExitStack() as stack:
        folder, home = "/", HOME
        if not is_isolated:
            folder = home = stack.enter_context(_folder())
            Path(folder, "main.py").write_bytes(_encoded(program))
        stdin_file, text = (stack.enter_context(_sealed(_encoded(content))) for content in (stdin, program))
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
            # -I ignores the user's environment variables and site packages.
            "command": [sys.executable, "-I", *(arguments or [f"{home}/main.py"])],
        }

        code = await run_program(
            [sys.executable, "-I", "-S", CHILD, json.dumps(settings)],
            limits.timeout_s,
            started,
            [future for future in (flood, until) if future is not None],
            stdin=stdin_file,
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
    # A program that was ended for its output or by `until` is not late.
    is_late = code is None and not flood.done() and (until is None or not until.done())
    # Without a status the program was ended from here, or it has killed its process group.
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
    """Pipe to which a program writes. At most `limit` bytes are kept.

    A pipe holds at most 1 MiB. A file could grow without bounds, by system calls that the limit on file sizes does not
    cover. The pipe is read in the event loop in which it is created.
    """

    def __init__(self, limit: int, overflow: asyncio.Future[Any] | None = None) -> None:
        """
        Args:
            limit: maximum number of bytes that are kept.
            overflow: done once there are more bytes.
        """
        self.content = bytearray()
        self._limit = limit
        self._overflow = overflow
        self._loop = asyncio.get_running_loop()
        reading, writing = os.pipe()
        self._reading: Any = os.fdopen(reading, "rb", buffering=0)
        self.writing = os.fdopen(writing, "wb", buffering=0)
        """The end of the program."""

    def __enter__(self) -> BoundedPipe:
        os.set_blocking(self._reading.fileno(), False)
        self._loop.add_reader(self._reading.fileno(), self.read)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._reading.close()
        self.writing.close()

    def read(self) -> bool:
        """Read available bytes, at most 64 KiB. Return False if there are none now or if the pipe was closed."""
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
        """Return the text that was written up to now, as far as it is kept."""
        while self.read():
            pass
        return self.content.decode(errors="replace")


def _sealed(content: bytes) -> IO[bytes]:
    """Return a file in memory with this content, which no process can change or extend."""
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
    """Create a folder for one program that is not isolated, and remove folders that killed processes have left."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as stack:
        while True:
            folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
            stack.enter_context(folder)
            # Before this process has the lock, another one may remove the folder as a left-over.
            with suppress(OSError):
                stack.enter_context(_locked(Path(folder.name)))
                if Path(folder.name).is_dir():
                    break
        yield folder.name


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. The lock ends with this process.

    Raises:
        OSError: another process holds it, or the folder belongs to another user.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@functools.cache
def _trees() -> list[str]:
    """Return the files and folders that a program sees: the interpreter with its packages, and the system's
    libraries.
    """
    candidates = dict.fromkeys([*SYSTEM, *_interpreter()])
    existing = [path for path in candidates if os.path.lexists(path)]
    return [path for path in existing if not any(path.startswith(f"{other}/") for other in existing)]


def _interpreter() -> Iterator[str]:
    """Yield the trees of this interpreter, and of each symbolic link from its name to the interpreter."""
    yield from (str(Path(path).absolute()) for path in (sys.prefix, sys.base_prefix))
    yield from (str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix))
    link = Path(sys.executable).absolute()
    while link.is_symlink():
        link = link.parent / link.readlink()
        yield os.path.normpath(link.parent.parent)


@functools.cache
def isolation_fault() -> str:
    """Return why programs cannot be isolated on this machine and what to do, or an empty string."""
    limits = Limits(timeout_s=60.0, cpu_s=10, memory_bytes=2**30)
    # In a thread, because the thread of the caller may have a running event loop.
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
    text = "programs of the policy run with the files and the network of this user, as %s=unsafe allows: %s"
    _log.warning(text, PERMISSION, fault)


def _shown(text: str, folder: str, most: int) -> str:
    # The name of the folder is random, and would make the text that the policy reads differ from run to run.
    return cut_text(text.replace(f"{folder}/", "").replace(folder, "."), most)


def _encoded(text: str) -> bytes:
    return text.encode(errors="replace")
