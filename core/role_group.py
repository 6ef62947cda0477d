"""RoleGroup: all workers of a role, seen as one. The one place that splits a call, sends it, and gathers answers."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, overload

from core.context import WorkloadContext, current
from core.errors import WorkerTimeout
from core.exports import CallSpec, Export
from core.futures import Future, FutureSequence, Pending
from core.members import Member, RoleEntry
from core.roles import Role
from core.sharding import chunk_sizes, is_splittable, payload_bytes, shard_arguments, unwrap

P = ParamSpec("P")
W = TypeVar("W")
Method = str | Callable[..., Any]

_SHARE_ABOVE_BYTES = 100_000
"""Arguments above this size are stored once instead of once per receiver; below, Ray sends them within the call."""


class RoleGroup(Generic[W]):
    """The workers of one role of the job that is running.

    It has a length, members, and iterates over them; every other name is a method of the workers.

    - `group.update(batch)`: as the method's `@trainer_invocation` says.
    - `group.call(stub, ...)`: to all, whole; `group.call_rank0(...)`: to the first;
      `group.call_batch(stub, size, ...)`: split over all.
    - `group.on(rank)`: the group of one worker, as of the one in the caller's own process.

    A trainer declares `RG_ACTOR: RoleGroup[Actor]` in its class, and a type checker then knows the methods of Actor and
    their arguments. So it does for an attribute of any other class that is declared there.

    Raises:
        ValueError: the job has no such role, unless optional=True (then the group is empty).
    """

    if TYPE_CHECKING:
        # Seen through the class, a decorated method is what the group returns; see `invocation.Exported`.
        def __get__(self, instance: Any, owner: Any) -> type[W]: ...
        def __set__(self, instance: Any, value: "RoleGroup[W] | None") -> None: ...

    def __init__(self, role: str, optional: bool = False, context: WorkloadContext | None = None) -> None:
        self._role = Role(role)
        self._fixed_context = context
        self._only: int | None = None
        if not optional and self._role not in self._context.directory:
            raise ValueError(f"the job has no role {self._role}; it has {sorted(self._context.directory)}")

    @property
    def _context(self) -> WorkloadContext:
        return self._fixed_context or current()

    @property
    def _entry(self) -> RoleEntry:
        # Looked up at each use: a group follows the replacement of a worker.
        return self._context.directory.get(self._role) or RoleEntry(self._role, "run", [])

    @property
    def _members(self) -> list[Member]:
        members = self._entry.members
        return members if self._only is None else [members[self._only]]

    def on(self, rank: int) -> Self:
        """The group of this one worker.

        Raises:
            ValueError: there is no such rank.
        """
        if rank not in range(len(self._entry.members)):
            raise ValueError(f"{self._role} has {len(self._entry.members)} workers, and no rank {rank}")
        one = copy.copy(self)
        one._only = rank
        return one

    @property
    def world_size(self) -> int:
        """How many workers."""
        return len(self)

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, index: int) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> list[Member]: ...
    def __getitem__(self, index: int | slice) -> Member | list[Member]:
        return self._members[index]

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._role}, {len(self)} workers)"

    # --- remote-call stubs

    @overload
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[list[Any]]: ...
    @overload
    def call(self, method: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Future[list[Any]]: ...
    def call(self, method: Method, /, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Call every worker with the same arguments; the result is a list in rank order."""
        return Future(self._broadcast(self._find(method), self._members, args, kwargs), self._context)

    @overload
    def call_rank0(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]: ...
    @overload
    def call_rank0(self, method: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Future[Any]: ...
    def call_rank0(self, method: Method, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the first worker only; the result is its value."""
        export = self._find(method)
        first = self._some_members(export)[:1]
        return Future(self._broadcast(export, first, args, kwargs), self._context, lambda v: v[0])

    @overload
    def call_batch(self, method: str, size: int, /, *args: Any, **kwargs: Any) -> FutureSequence[Any]: ...
    @overload
    def call_batch(
        self, method: Callable[P, Any], size: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[Any]: ...
    def call_batch(self, method: Method, size: int, /, *args: Any, **kwargs: Any) -> FutureSequence[Any]:
        """Split the arguments that have `size` items over the workers; the result is the sequence of all items.

        Raises:
            ValueError: nothing was splittable, or an argument has not `size` items, or a train role has more ranks
                than there are items (its ranks enter collectives together).
        """
        export = self._find(method)
        splittable = [value for value in (*args, *kwargs.values()) if is_splittable(value)]
        for value in splittable:
            if len(value) != size:
                raise ValueError(f"{self._role}.{export.name}: size is {size}, but an argument has {len(value)} items")
        if not splittable:
            raise ValueError(f"{self._role}.{export.name}: none of the arguments can be split; use call instead")
        calls, lengths = self._scatter(export, args, kwargs)
        return FutureSequence(calls, lengths, self._context)

    # --- the trainer's role group

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        exports = self._entry.exports
        export = exports.get(name)
        if export is None or not self._may_call(export):
            raise AttributeError(self._unknown(name, [n for n, e in exports.items() if self._may_call(e)]))
        return functools.partial(self._invoke, export)

    def _may_call(self, export: Export) -> bool:
        return export.spec is not None

    def _invoke(self, export: Export, /, *args: Any, **kwargs: Any) -> Any:
        spec = export.spec
        assert spec is not None
        if spec.pre_func is not None:
            args, kwargs = _prepared(spec.pre_func(*args, **kwargs), f"{self._role}.{export.name}"), {}
        members = self._some_members(export)
        if spec.target == "RANK0":
            calls = self._broadcast(export, members[:1], args, kwargs)
        elif spec.auto_shard and any(is_splittable(value) for value in (*args, *kwargs.values())):
            calls, _ = self._scatter(export, args, kwargs)
        else:
            calls = self._broadcast(export, members, args, kwargs)
        future = Future(calls, self._context, functools.partial(_finished, spec))
        if not spec.blocking:
            return future
        while True:
            try:
                return future.result(spec.timeout if spec.is_async else None)
            except WorkerTimeout as late:
                # The master ends who is late, as if it had died; what is idempotent then goes to the replacement.
                self._context.emit("hung", (late.missing, str(late)))
                if not (export.idempotent and self._context.recovery.may_return(self._entry.members[0])):
                    raise

    # --- sending

    def _some_members(self, export: Export) -> list[Member]:
        if not self._entry.members:
            raise ValueError(f"{self._role} has no worker to call {export.name} on")
        return self._members

    def _find(self, method: Method) -> Export:
        name = method if isinstance(method, str) else method.__name__
        export = self._entry.exports.get(name)
        if export is None and self._entry.members:
            raise AttributeError(self._unknown(name, list(self._entry.exports)))
        return export or Export(name, name)  # nobody is called

    def _unknown(self, name: str, known: list[str]) -> str:
        listed = ", ".join(sorted(known)) or "nothing"
        return f"{self._role} ({self._entry.implementation}) has no method {name!r} to call; it has {listed}"

    def _broadcast(
        self, export: Export, members: list[Member], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Pending]:
        args = tuple(self._share(value, len(members)) for value in args)
        kwargs = {key: self._share(value, len(members)) for key, value in kwargs.items()}
        return [self._send(member, export, args, kwargs) for member in members]

    def _scatter(
        self, export: Export, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Pending], list[int]]:
        members, train = self._some_members(export), self._entry.kind == "train"
        # What may be sent again to one worker enters no collective, so that ranks may be idle in it too.
        parts, sizes = self._cut(export, args, kwargs, len(members), train and not export.idempotent)
        # With fewer items than workers the last ones have nothing to do and are not called.
        sizes = [size for size in sizes if size]
        return [self._send(m, export, *part) for m, part in zip(members, parts[: len(sizes)], strict=False)], sizes

    def _cut(
        self, export: Export, args: tuple[Any, ...], kwargs: dict[str, Any], workers: int, everybody: bool
    ) -> tuple[list[tuple[tuple[Any, ...], dict[str, Any]]], list[int]]:
        """Each worker's arguments, and how many items each has; `everybody` must have one."""
        name = f"{self._role}.{export.name}"
        args = tuple(value if is_splittable(value) else self._share(value, workers) for value in args)
        kwargs = {key: v if is_splittable(v) else self._share(v, workers) for key, v in kwargs.items()}
        chunks, length = shard_arguments(args, kwargs, workers, name)
        if length is None:
            raise ValueError(f"{name}: none of the arguments can be split; give a list, an array or a batch")
        if everybody and length < workers:
            raise ValueError(
                f"{name} got {length} items for {workers} ranks, which must all take part; "
                "give at least one item per rank, or replicate(x) to send it whole"
            )
        return chunks, chunk_sizes(length, workers)

    def _share(self, value: Any, receivers: int) -> Any:
        value = unwrap(value)
        if receivers > 1 and payload_bytes(value) > _SHARE_ABOVE_BYTES:
            return self._context.transport.put(value)
        return value

    def _send(self, member: Member, export: Export, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending:
        return Pending(self._context, member, export, args, kwargs)


def _finished(spec: CallSpec, values: list[Any]) -> Any:
    if spec.post_func is not None:
        return spec.post_func(values)
    return values[0] if spec.target == "RANK0" else values


def _prepared(sent: Any, name: str) -> tuple[Any, ...]:
    """What a pre_func returned, as arguments."""
    if isinstance(sent, tuple) and len(sent) == 2 and isinstance(sent[0], tuple) and isinstance(sent[1], dict):
        raise ValueError(
            f"pre_func of {name} returned a pair (args, kwargs), as DLRover's do; here it gets the arguments alone, "
            "without the group, and returns what is sent: return *args, or one value"
        )
    return sent if isinstance(sent, tuple) else (sent,)
