"""Who is in a job and what they export, and how calls to them travel."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

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
    exports: dict[str, Export] = field(default_factory=dict)
    resource: dict[str, float] = field(default_factory=dict)
    implementation: str = ""
    has_run: bool = False
    """Whether its class has a `run()`."""


Directory = dict[Role, RoleEntry]


@dataclass(slots=True)
class Outcome:
    """What one call to one worker came to: a value, or an error.

    `raised`: whether the method itself raised the error; else it is about the worker or the way to it.
    """

    value: Any = None
    error: BaseException | None = None
    raised: bool = False


class Transport(Protocol):
    """How calls travel. One implementation per backend; references are the backend's own."""

    is_inline: bool
    """Whether calls run in this process, on the thread of who waits for them."""

    def send(self, member: Member, export: Export, share: Share) -> Any:
        """Submit one call and return a reference to its outcome."""
        ...

    def put(self, value: Any) -> Any:
        """Store a value once for many receivers; the reference may be passed as an argument."""
        ...

    def wait(self, references: Sequence[Any], timeout: float | None, count: int = 1) -> list[Any]:
        """Those of the references that are ready, once `count` are, or after `timeout` seconds (0: at once).

        It may leave out what is ready beyond `count`, but with a timeout of 0.
        """
        ...

    async def ready(self, references: Sequence[Any]) -> None:
        """Wait until all are ready, without a thread of one's own."""
        ...

    def outcome(self, reference: Any) -> Outcome:
        """The outcome of a reference that is ready."""
        ...

    def values(self, references: Sequence[Any]) -> list[Any] | None:
        """All values, if within a moment all are there and none is an error; else None, and `wait` finds out more."""
        ...
