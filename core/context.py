"""Per-call context: the identity of the current workload, the directory of roles, and the user-facing log.

A process may hold several workloads, so the context is a context variable and not a process-wide global. A thread that
a workload starts inherits the context if it is run through `contextvars.copy_context().run`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.members import Directory, Transport
from core.roles import Role


@dataclass(frozen=True)
class Identity:
    """Identity of a worker: its job, run, role and ranks.

    `began` is the start time of the run in seconds since the epoch. `attempt` is 1 at the first start and increases by
    one with every restart of this worker, alone or with the whole job.
    """

    job: str
    run_id: str
    began: float
    role: Role
    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 1

    @property
    def name(self) -> str:
        """Display name, such as `ACTOR-0`."""
        return f"{self.role}-{self.rank}"


@dataclass
class WorkloadContext:
    """Everything that a workload can access of its job.

    `shared_dir` is a folder in the shared memory of this machine. It is removed when the run ends, also after a kill.
    """

    identity: Identity
    config: Any
    directory: Directory
    transport: Transport
    emit: Callable[[str, Any], None]
    """Callback that sends the master a message, given its kind and its content."""
    shared_dir: Path
    collocated_with: tuple[str, ...] = ()
    rendezvous: tuple[str, int] | None = None
    waits: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Context manager around every wait for a result. Other workloads of the process may run during the wait."""
    stop_requested: threading.Event = field(default_factory=threading.Event)
    exported: list[Any] = field(default_factory=list)
    """(export, function) pairs in addition to those of the workload's class."""
    job_memory: Callable[[], int] = lambda: 0
    """Callback that returns the memory of all processes of the job in bytes."""

    def info(self, text: str) -> None:
        """Print a line at the terminal where the job was started."""
        self.emit("info", text)


_current: ContextVar[WorkloadContext | None] = ContextVar("troupe_workload", default=None)


def current() -> WorkloadContext:
    """Return the context of the workload that runs in this thread.

    Raises:
        RuntimeError: no workload runs in this thread.
    """
    context = _current.get()
    if context is None:
        # A new thread has an empty context, so it must get a copy of the context of its creator.
        raise RuntimeError(
            "no workload is running in this thread, so it has no job context; call this from a workload's method "
            "(start your own threads with contextvars.copy_context().run)"
        )
    return context


def running_name() -> str:
    """Return the name of the workload that runs in this thread, or an empty string."""
    context = _current.get()
    return context.identity.name if context else ""


@contextlib.contextmanager
def entered(context: WorkloadContext) -> Iterator[None]:
    """Make `context` the result of `current()` inside the block."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def info(text: str) -> None:
    """Print a line at the terminal where the job was started."""
    current().info(text)
