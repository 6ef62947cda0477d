"""Who am I, whom can I call, and how do I tell the user something: one context variable per call.

A process may hold several workloads, so nothing here is a process-wide global; threads that a workload starts inherit
its context when they are run through `contextvars.copy_context().run`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from core.invocation import Export
from core.recovery import Recovery
from core.roles import Role

Kind = Literal["train", "run"]


class Outcome:
    """What one call to one worker came to: a value, or an error.

    `seconds`: how long it ran, where it ran in this process and nobody could be said to be late before it came back.
    """

    __slots__ = ("error", "seconds", "value")

    def __init__(self, value: Any = None, error: BaseException | None = None, seconds: float = 0.0) -> None:
        self.value = value
        self.error = error
        self.seconds = seconds


class Transport(Protocol):
    """How calls travel. One implementation per backend; references are the backend's own."""

    is_inline: bool
    """Whether calls run in this process, on the thread of who waits for them."""

    def send(self, member: "Member", export: Export, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Submit one call and return a reference to its outcome."""
        ...

    def put(self, value: Any) -> Any:
        """Store a value once for many receivers; the reference may be passed as an argument."""
        ...

    def wait(self, references: list[Any], timeout: float | None) -> list[Any]:
        """Those of the references that are ready after at most `timeout` seconds; None waits for all."""
        ...

    def outcome(self, reference: Any) -> Outcome:
        """The outcome of a reference that is ready."""
        ...

    def values(self, references: list[Any]) -> list[Any] | None:
        """All values, if within a moment all are there and none is an error; else None, and `wait` finds out more."""
        ...


@dataclass(frozen=True)
class Member:
    """One worker of a role, as others see it."""

    role: Role
    rank: int
    handle: Any
    attempt: int = 1
    """Which process of this worker it is: one more for each replacement."""

    @property
    def name(self) -> str:
        """For people: `ACTOR-0`."""
        return f"{self.role}-{self.rank}"


@dataclass
class RoleEntry:
    """One role of the running job: its workers, what they export, what each of them was given."""

    role: Role
    kind: Kind
    members: list[Member]
    exports: dict[str, Export] = field(default_factory=dict)
    resource: dict[str, float] = field(default_factory=dict)
    implementation: str = ""


Directory = dict[Role, RoleEntry]


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
    say: Callable[[str], None]
    shared_dir: Path
    collocated_with: tuple[Role, ...] = ()
    rendezvous: tuple[str, int] | None = None
    release_port: Callable[[], None] = lambda: None
    recovery: Recovery = field(default_factory=Recovery)
    tell: Callable[[str, Any], None] = lambda *_: None
    """Sends the master a message: its kind, and what it says."""
    stop_requested: threading.Event = field(default_factory=threading.Event)
    job_memory: Callable[[], int] = lambda: 0
    """Bytes that the processes of the job take together."""


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


@contextlib.contextmanager
def entered(context: WorkloadContext) -> Iterator[None]:
    """Answer `current()` with `context` inside a block."""
    before = _current.set(context)
    try:
        yield
    finally:
        _current.reset(before)


def say(text: str) -> None:
    """Show a line to the person at the terminal where the job was started."""
    current().say(text)
