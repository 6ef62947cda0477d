"""Who am I, whom can I call, and how do I tell the user something: one context variable per call.

A process may hold several workloads, so nothing here is a process-wide global; threads that a workload starts inherit
its context when they are run through `contextvars.copy_context().run`.
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
    """Which worker of which role of which job this is.

    `began` is when the run did, in seconds since the epoch. `attempt` is 1, and one more each time that this worker
    was started again, alone or with the whole job.
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
        """For people: `ACTOR-0`."""
        return f"{self.role}-{self.rank}"


@dataclass
class WorkloadContext:
    """Everything a workload can know of its job.

    `shared_dir` is a folder in shared memory on this machine that is emptied when the run ends, also after a kill.
    """

    identity: Identity
    config: Any
    directory: Directory
    transport: Transport
    emit: Callable[[str, Any], None]
    """Sends the master a message: its kind, and what it says."""
    shared_dir: Path
    collocated_with: tuple[str, ...] = ()
    rendezvous: tuple[str, int] | None = None
    waits: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Around every wait for an answer: other workloads of the process may work meanwhile."""
    stop_requested: threading.Event = field(default_factory=threading.Event)
    exported: list[Any] = field(default_factory=list)
    """(export, function) pairs beside those of the workload's class."""
    job_memory: Callable[[], int] = lambda: 0
    """Bytes that the processes of the job take together."""

    def info(self, text: str) -> None:
        """Show a line to the person at the terminal where the job was started."""
        self.emit("info", text)


_current: ContextVar[WorkloadContext | None] = ContextVar("troupe_workload", default=None)


def current() -> WorkloadContext:
    """The context of the workload that is running now.

    Raises:
        RuntimeError: nothing of a job is running in this thread.
    """
    context = _current.get()
    if context is None:
        raise RuntimeError(
            "no workload is running here, so there is no job to ask; call this from a workload's method "
            "(in a thread of your own: start it with contextvars.copy_context().run)"
        )
    return context


def running_name() -> str:
    """Name of the workload that is running in this thread, or an empty string."""
    context = _current.get()
    return context.identity.name if context else ""


@contextlib.contextmanager
def entered(context: WorkloadContext) -> Iterator[None]:
    """Answer `current()` with `context` inside a block."""
    before = _current.set(context)
    try:
        yield
    finally:
        _current.reset(before)


def info(text: str) -> None:
    """Show a line to the person at the terminal where the job was started."""
    current().info(text)
