"""WorkerGroup: a role group seen through a class, whose methods say how their arguments are given out and collected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, overload

from core.context import WorkloadContext
from core.exports import Export, Replay, export_of
from core.futures import Future, Pending, join_results
from core.invocation import marker
from core.names import hint_after
from core.role_group import RoleGroup

if TYPE_CHECKING:
    from core.invocation import FALSE, TRUE, Exported, Mark, Method, Repeats

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")
Share = tuple[tuple[Any, ...], dict[str, Any]]
"""One worker's arguments."""


class Dispatch(Enum):
    """How the arguments of a call are given out to the workers, and what returns.

    "Split" is the rule of role groups: lists, arrays and batches are cut into contiguous chunks that differ by at most
    one item, and everything else goes whole to everybody. Nothing is padded.
    """

    ONE_TO_ALL = "every worker gets every argument whole; returns the list of their answers"
    RANK_ZERO = "the first worker alone gets the arguments, whole; returns its answer"
    ALL_TO_ALL = "every argument is a list or tuple with one item for each worker; returns the list of their answers"
    DP_COMPUTE = "the same as ALL_TO_ALL"
    DP_COMPUTE_PROTO = "arguments are split; returns the answers joined"


@dataclass(frozen=True)
class NdDispatch:
    """Made by `nd_compute`."""

    mesh: str


def nd_compute(mesh: str) -> NdDispatch:
    """Split over the data-parallel ranks of a mesh, that each worker has told by `register_mesh`; returns joined.

    Workers of one data-parallel rank (tensor or sequence parallel peers) get the same chunk, which is stored once. The
    answer of a data-parallel rank is that of its one worker with `is_collect`.
    """
    return NdDispatch(mesh)


Mode = Dispatch | NdDispatch


@dataclass(frozen=True)
class DispatchSpec:
    """How a worker group calls a method."""

    mode: Mode
    blocking: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.mode, Mode):
            raise ValueError(
                f"dispatch_mode={self.mode!r}; give one of {', '.join(f'Dispatch.{m.name}' for m in Dispatch)}, "
                "or nd_compute(mesh)"
            )


_OneAnswer = Literal[Dispatch.RANK_ZERO, Dispatch.DP_COMPUTE_PROTO] | NdDispatch
"""Modes whose call returns the only answer, or all joined."""
_ToAll = Literal[Dispatch.ONE_TO_ALL]


@overload
def register(dispatch_mode: _OneAnswer, blocking: TRUE = ..., **options: Unpack[Repeats]) -> Mark[P, R, R]: ...
@overload
def register(dispatch_mode: _OneAnswer, blocking: FALSE, **options: Unpack[Repeats]) -> Mark[P, R, Future[R]]: ...
@overload
def register(dispatch_mode: _ToAll, blocking: TRUE = ..., **options: Unpack[Repeats]) -> Mark[P, R, list[R]]: ...
@overload
def register(dispatch_mode: _ToAll, blocking: FALSE, **options: Unpack[Repeats]) -> Mark[P, R, Future[list[R]]]: ...
@overload
def register(
    dispatch_mode: Mode = ..., blocking: bool = ..., **options: Unpack[Repeats]
) -> Callable[[Method[P, R]], Exported[Callable[P, R], Callable[..., Any]]]: ...
def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    blocking: bool = True,
    *,
    idempotent: bool = False,
    replay: Replay | None = None,
    **unknown: Any,
) -> Any:
    """Make a method callable through worker groups, `self.actor_rollout.generate_sequences(batch)`.

    Args:
        dispatch_mode: a `Dispatch`, or `nd_compute(mesh)`.
        blocking: wait for the result; False returns a Future.
        idempotent: as in `trainer_invocation`.
        replay: as in `trainer_invocation`.

    Raises:
        ValueError: an option has a value that cannot work; raised when the class is defined.
    """
    if unknown:
        raise ValueError(f"register has no {sorted(unknown)}" + hint_after("register", *unknown))
    spec = DispatchSpec(dispatch_mode, blocking)
    return marker(lambda name: Export(name, name, idempotent=idempotent, replay=replay, dispatch=spec))


class WorkerGroup(RoleGroup[W]):
    """All workers of a role, with each method of `cls` that `@register` has marked as a method of its own.

    `call`, `call_rank0` and `call_batch` of role groups reach every exported method, with a Future each. A trainer that
    declares `actor: WorkerGroup[Actor]` in its class has its calls checked by type checkers.

    Args:
        role: the role.
        cls: the class of its workers, to see that they have all that is registered there; None takes what they have.

    Raises:
        ValueError: the job has no such role, unless optional=True; or its workers lack a method of `cls`.
    """

    def __init__(
        self, role: str, cls: type[W] | None = None, optional: bool = False, context: WorkloadContext | None = None
    ) -> None:
        super().__init__(role, optional, context)
        self._positions: dict[str, list[tuple[int, bool]]] = {}
        wanted = {found.name for name in dir(cls) if (found := export_of(getattr(cls, name, None))) and found.dispatch}
        missing = sorted(wanted - set(self._entry.exports))
        if missing and self._entry.members:
            raise ValueError(
                f"the workers of {self._role} are {self._entry.implementation}, which has no {', '.join(missing)}; "
                f"give their own class, not {cls}"
            )

    def _may_call(self, export: Export) -> bool:
        return export.dispatch is not None

    def _invoke(self, export: Export, /, *args: Any, **kwargs: Any) -> Any:
        members, spec = self._some_members(export), export.dispatch
        if isinstance(spec.mode, NdDispatch):
            future = self._call_mesh(export, spec.mode.mesh, args, kwargs)
        elif spec.mode is Dispatch.RANK_ZERO:
            future = Future(self._broadcast(export, members[:1], args, kwargs), self._context, lambda v: v[0])
        elif spec.mode is Dispatch.ONE_TO_ALL:
            future = Future(self._broadcast(export, members, args, kwargs), self._context)
        elif spec.mode is Dispatch.DP_COMPUTE_PROTO:
            calls, _ = self._scatter(export, args, kwargs)
            future = self._joined(calls, calls)
        else:
            future = Future(self._deal(export, self._own_shares(export, args, kwargs)), self._context)
        return future.result() if spec.blocking else future

    def _joined(self, calls: list[Pending], answering: list[Pending]) -> Future[Any]:
        """Of the calls only those in `answering` have answers to be joined; the others are their peers."""
        place = {id(call): i for i, call in enumerate(calls)}
        places = [place[id(call)] for call in answering]
        return Future(calls, self._context, lambda values: join_results([values[i] for i in places], answering))

    def _own_shares(self, export: Export, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Share]:
        """Each worker's arguments, where every argument has one item for each worker."""
        count = len(self)
        for label, value in [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]:
            if not isinstance(value, list | tuple) or len(value) != count:
                size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
                raise ValueError(
                    f"{self._role}.{export.name}: {label} is a {type(value).__name__}{size}, not a list with one item "
                    f"for each of the {count} workers; give one, or register the method with Dispatch.ONE_TO_ALL to "
                    "send arguments whole"
                )
        return [(tuple(v[i] for v in args), {k: v[i] for k, v in kwargs.items()}) for i in range(count)]

    def _deal(self, export: Export, shares: list[Share]) -> list[Pending]:
        members = self._members
        return [self._send(member, export, *share) for member, share in zip(members, shares, strict=True)]

    # --- meshes

    def _call_mesh(self, export: Export, mesh: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        positions = self._mesh(mesh)
        ranks = max(rank for rank, _ in positions) + 1
        chunks, _ = self._cut(export, args, kwargs, ranks, everybody=True)
        peers = Counter(rank for rank, _ in positions)
        # Stored once for all who read it.
        stored = [
            (tuple(self._share(v, n) for v in args), {k: self._share(v, n) for k, v in kwargs.items()})
            for (args, kwargs), n in ((chunk, peers[rank]) for rank, chunk in enumerate(chunks))
        ]
        calls = self._deal(export, [stored[rank] for rank, _ in positions])
        answering = sorted((rank, i) for i, (rank, collects) in enumerate(positions) if collects)
        return self._joined(calls, [calls[i] for _, i in answering])

    def _mesh(self, mesh: str) -> list[tuple[int, bool]]:
        """(data-parallel rank, whether its answer counts) of each worker; asked once."""
        if mesh not in self._positions:
            found = self.call("mesh_position", mesh).result()
            ranks = sorted(rank for rank, collects in found if collects)
            if ranks != list(range(max(rank for rank, _ in found) + 1)):
                raise ValueError(
                    f"mesh {mesh!r} of {self._role}: the workers' data-parallel ranks are {[r for r, _ in found]}, and "
                    f"answers are to be taken from ranks {ranks}; each rank from 0 needs exactly one with is_collect"
                )
            self._positions[mesh] = found
        return self._positions[mesh]
