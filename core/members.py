"""Who is in a job and what they export, and how calls to them travel."""

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
"""What one worker is given in a call: arguments by position, and by name."""


@dataclass(frozen=True)
class Member:
    """One worker of a role, as others see it."""

    role: Role
    rank: int
    handle: Any
    attempt: int = 1
    """Which process of this worker it is: one more for each replacement."""
    thread: str = ""
    """Its own thread in a process that several workers share; empty where it is alone."""

    @property
    def name(self) -> str:
        """For people: `ACTOR-0`."""
        return f"{self.role}-{self.rank}"


@dataclass
class RoleEntry:
    """One role of the running job: its workers, what they export, what each of them was given."""

    kind: Kind
    members: list[Member]
    sent_exports: dict[str, Export] | bytes = field(default_factory=dict)
    """As `exports`; pickled where they come from another process."""
    resource: dict[str, float] = field(default_factory=dict)
    implementation: str = ""
    has_run: bool = False
    """Whether its class has a `run()`."""

    @functools.cached_property
    def exports(self) -> dict[str, Export]:
        """What its workers let others call, by name."""
        return pickle.loads(self.sent_exports) if isinstance(self.sent_exports, bytes) else self.sent_exports


class Directory(dict[Role, RoleEntry]):
    """Who is in the job, as one process knows it; its threads share it.

    The master tells every process, through its control channel, who is lost, and who has taken the place.

    Args:
        recovers: whether who is lost is replaced.
    """

    def __init__(self, recovers: bool = False) -> None:
        super().__init__()
        self._recovers = recovers
        self._changed = threading.Condition()
        self._lost: set[tuple[str, int]] = set()

    def may_return(self, member: Member) -> bool:
        """Whether a worker that died comes back: instances of a `run` role do, within their budget."""
        entry = self.get(member.role)
        return self._recovers and entry is not None and entry.kind == "run"

    def replacement(self, member: Member, timeout: float | None = None) -> Member | None:
        """Who stands in for a member: itself while it lives; None if nobody does after `timeout` seconds."""
        if not self._recovers:
            return member
        with self._changed:
            is_back = self._changed.wait_for(lambda: (member.role, member.rank) not in self._lost, timeout)
            return self[member.role].members[member.rank] if is_back else None

    def report_dead(self, member: Member) -> None:
        """A call found out that a member is gone, perhaps before the master did."""
        with self._changed:
            if self.may_return(member) and self[member.role].members[member.rank] == member:
                self._lost.add((member.role, member.rank))

    def lose(self, role: str, rank: int) -> None:
        """From now on, calls to this worker wait for its replacement."""
        with self._changed:
            self._lost.add((role, rank))

    def replace(self, member: Member) -> None:
        """The worker is back as `member`."""
        with self._changed:
            # Before the process was told who is there, there is nothing to correct.
            if member.role in self:
                self[member.role].members[member.rank] = member
            self._lost.discard((member.role, member.rank))
            self._changed.notify_all()

    def meet(self, found: Mapping[Role, RoleEntry]) -> None:
        """Take in who was found, but for those whose replacements are there already."""
        with self._changed:
            for role, entry in found.items():
                for now in self[role].members if role in self else ():
                    if now.attempt > entry.members[now.rank].attempt:
                        entry.members[now.rank] = now
                self[role] = entry


@dataclass(slots=True, eq=False)
class Outcome:
    """What one call to one worker came to: a value, or an error.

    `raised`: whether the method itself raised the error; else it is about the worker or the way to it.
    """

    value: Any = None
    error: BaseException | None = None
    raised: bool = False


class Transport(ABC):
    """How calls travel; references are the backend's own.

    What is here is for calls inside this process, which are over when they have been sent: a reference is its outcome.
    """

    @abstractmethod
    def send(self, member: Member, export: Export, share: Share) -> Any:
        """Submit one call and return a reference to its outcome."""

    def put(self, value: Any) -> Any:
        """Store a value once for many receivers; the reference may be passed as an argument."""
        return value

    def wait(self, references: Sequence[Any], timeout: float | None, count: int = 1) -> list[Any]:  # noqa: ARG002
        """Those of the references that are ready, once `count` are, or after `timeout` seconds (0: at once).

        It may leave out what is ready beyond `count`, but with a timeout of 0.
        """
        return list(references)

    async def ready(self, references: Sequence[Any]) -> None:  # noqa: ARG002
        """Wait until all are ready, without a thread of one's own."""
        await asyncio.sleep(0)  # others may work

    def outcome(self, reference: Any) -> Outcome:
        """The outcome of a reference that is ready."""
        return reference

    def values(self, references: Sequence[Any]) -> list[Any] | None:  # noqa: ARG002
        """All values, if within a moment all are there and none is an error; else None, and `wait` finds out more."""
        return None
