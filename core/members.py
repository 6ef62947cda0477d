"""Members of a job, their exports, and the interface of the transport that carries calls to them."""

import asyncio
import functools
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from core.exports import Export
from core.roles import Role

Kind = Literal["train", "run"]
Share = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one worker in a call: positional arguments and keyword arguments."""


@dataclass(frozen=True)
class Member:
    """Address of one worker of a role."""

    role: Role
    rank: int
    handle: Any
    attempt: int = 1
    """Number of the worker's process, counted from 1. Every replacement increases it by one."""
    thread: str = ""
    """Name of the worker's thread in a process that several workers share. Empty if it has the process to itself."""

    @property
    def name(self) -> str:
        """Display name, such as `ACTOR-0`."""
        return f"{self.role}-{self.rank}"


@dataclass
class RoleEntry:
    """One role of the running job: its workers, their exports, and the resources of each worker."""

    kind: Kind
    members: list[Member]
    sent_exports: dict[str, Export] | bytes = field(default_factory=dict)
    """Value of `exports`, pickled if it comes from another process."""
    resource: dict[str, float] = field(default_factory=dict)
    implementation: str = ""
    has_run: bool = False
    """True if the class has a `run()`."""

    @functools.cached_property
    def exports(self) -> dict[str, Export]:
        """Exported methods of the workers, by name."""
        return pickle.loads(self.sent_exports) if isinstance(self.sent_exports, bytes) else self.sent_exports


class Directory(dict[Role, RoleEntry]):
    """Directory of the job's roles and workers, shared by the threads of one process.

    The master reports lost workers and their replacements to every process through its control channel.

    Args:
        recovers: True if lost workers are replaced.
    """

    def __init__(self, recovers: bool = False) -> None:
        super().__init__()
        self._recovers = recovers
        self._changed = threading.Condition()
        self._lost: set[tuple[str, int]] = set()

    def may_return(self, member: Member) -> bool:
        """True if a dead worker is replaced: instances of a `run` role are, within their restart budget."""
        entry = self.get(member.role)
        return self._recovers and entry is not None and entry.kind == "run"

    def replacement(self, member: Member, timeout: float | None = None) -> Member | None:
        """Return the current process of a worker: the member itself, or its replacement.

        Waits for the replacement of a lost worker, and returns None if there is none after `timeout` seconds.
        """
        if not self._recovers:
            return member
        with self._changed:
            if not self._changed.wait_for(lambda: (member.role, member.rank) not in self._lost, timeout):
                return None
            return self[member.role].members[member.rank]

    def report_dead(self, member: Member) -> None:
        """Mark a worker as lost after a call to it has failed, possibly before the master has noticed."""
        with self._changed:
            if self.may_return(member) and self[member.role].members[member.rank] == member:
                self._lost.add((member.role, member.rank))

    def lose(self, role: str, rank: int) -> None:
        """Mark a worker as lost. Calls to it then wait for its replacement."""
        with self._changed:
            self._lost.add((role, rank))

    def replace(self, member: Member, rank: int) -> None:
        """Record the replacement of a worker or an additional worker, and release the calls that wait for it.

        Args:
            member: the worker.
            rank: rank whose calls it takes from now on. If it is not its own rank, the worker of that rank is no member
                of the role any more.
        """
        with self._changed:
            # A process that has not received the directory yet has no entry to correct.
            if member.role in self:
                self[member.role].members[rank : rank + 1] = [member]
            self._lost.discard((member.role, rank))
            self._changed.notify_all()

    def add_entries(self, entries: Mapping[Role, RoleEntry]) -> None:
        """Store the entries of roles. Members that are known to be newer replace those in `entries`."""
        with self._changed:
            for role, entry in entries.items():
                known = self.get(role, RoleEntry(entry.kind, []))
                for member in known.members:
                    if member.attempt > entry.members[member.rank].attempt:
                        entry.members[member.rank] = member
                self[role] = entry


@dataclass(slots=True, eq=False)
class Outcome:
    """Outcome of one call to one worker: a value or an error.

    `raised` is True if the method itself raised the error, and False if the worker or the connection failed.
    """

    value: Any = None
    error: BaseException | None = None
    raised: bool = False


class Transport(ABC):
    """Interface that sends calls to workers and fetches their outcomes. References are opaque to the callers.

    The methods implemented in this class serve calls inside this process. Such a call has finished when `send` returns,
    and its reference is the outcome itself.
    """

    @abstractmethod
    def send(self, member: Member, export: Export, share: Share) -> Any:
        """Submit one call and return a reference to its outcome."""

    def put(self, value: Any) -> Any:
        """Store a value once for many receivers. The returned reference may be passed as an argument."""
        return value

    def wait(self, references: Sequence[Any], timeout: float | None, count: int = 1) -> list[Any]:  # noqa: ARG002
        """Wait until `count` references are ready or `timeout` seconds have passed, and return the ready ones.

        With a timeout of 0 it returns all ready references immediately. Otherwise it may omit ready references beyond
        `count`.
        """
        return list(references)

    async def ready(self, references: Sequence[Any]) -> None:  # noqa: ARG002
        """Wait until all references are ready, without blocking a thread."""
        await asyncio.sleep(0)  # otherwise a coroutine that only awaits local calls would block the event loop

    def outcome(self, reference: Any) -> Outcome:
        """Return the outcome of a ready reference."""
        return reference

    def values(self, references: Sequence[Any]) -> list[Any] | None:  # noqa: ARG002
        """Return all values if they arrive within a moment without an error, else None. Then `wait` has the details."""
        return None
