"""RoleGroup: proxy of all workers of a role. It splits calls, sends them, and gathers the results.

WorkerGroup is its counterpart with verl's names.
"""

import copy
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, overload

from core.context import WorkloadContext, current
from core.errors import WorkerTimeout
from core.exports import CallSpec, Dispatch, Export, NdDispatch, Replicated, export_of
from core.futures import Future, FutureSequence, Pending, ReferenceFuture, join_results
from core.members import Member, RoleEntry, Share
from core.roles import Role
from core.sharding import chunk_sizes, is_splittable, payload_bytes, shard_arguments, unwrap

P = ParamSpec("P")
W = TypeVar("W")
Method = str | Callable[..., Any]

_SHARE_ABOVE_BYTES = 100_000
"""Arguments above this size are stored once for all receivers. Ray sends smaller ones with every call."""


class RoleGroup(Generic[W]):
    """Proxy of the workers of one role of the running job.

    A group has a length and members, and iterates over them. Every other attribute is a method of the workers.

    - `group.update(batch)`: call with the options of the method's `@trainer_invocation` or `@register`.
    - `group.call(stub, ...)`: call all workers, with the arguments whole.
    - `group.call_rank0(...)`: call the first worker.
    - `group.call_batch(stub, size, ...)`: split the arguments over all workers.
    - `group.on(rank)`: return the group of one worker, for example of the one in the caller's process.

    If a trainer declares `RG_ACTOR: RoleGroup[Actor]` in its class, a type checker knows the methods of Actor and their
    arguments. This also holds for attributes of other classes that are declared in the same way.

    Args:
        role: name of the role.
        optional: return an empty group if the job does not have the role.
        context: context of the calling workload. Default: the current context at each call.

    Raises:
        ValueError: the job does not have the role, and optional is False.
    """

    if TYPE_CHECKING:
        # When a decorated method is read from the class, it has the return type of the group call; see
        # `invocation.Exported`.
        def __get__(self, instance: Any, owner: Any) -> type[W]: ...
        def __set__(self, instance: Any, value: "RoleGroup[W] | None") -> None: ...

    def __init__(self, role: str, optional: bool = False, context: WorkloadContext | None = None) -> None:
        self._role = Role(role)
        self._fixed_context = context
        self._only: int | None = None
        self._positions: dict[str, list[tuple[int, bool]]] = {}
        if not optional and self._role not in self._context.directory:
            raise ValueError(f"the job has no role {self._role}; it has {sorted(self._context.directory)}")

    @property
    def _context(self) -> WorkloadContext:
        return self._fixed_context or current()

    @property
    def _entry(self) -> RoleEntry:
        # Looked up at each use, so that calls go to the replacement of a worker and not to its dead process.
        return self._context.directory.get(self._role) or RoleEntry("run", [])

    @property
    def _members(self) -> list[Member]:
        members = self._entry.members
        # A worker that takes the calls of a removed one is in the list twice.
        return [m for i, m in enumerate(members) if m.rank == i] if self._only is None else [members[self._only]]

    def on(self, rank: int) -> Self:
        """Return the group of one worker.

        Raises:
            ValueError: the role has no such rank.
        """
        if rank not in range(len(self._entry.members)):
            raise ValueError(f"{self._role} has {len(self._entry.members)} workers, so there is no rank {rank}")
        group = copy.copy(self)
        group._only = rank
        return group

    @property
    def world_size(self) -> int:
        """Number of workers."""
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
        """Call every worker with the same arguments. The result is a list in rank order."""
        return Future(self._broadcast(self._find(method), self._members, (args, kwargs)), self._context)

    @overload
    def call_rank0(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]: ...
    @overload
    def call_rank0(self, method: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Future[Any]: ...
    def call_rank0(self, method: Method, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the first worker only. The result is its return value."""
        export = self._find(method)
        first = self._some_members(export)[:1]
        return Future(self._broadcast(export, first, (args, kwargs)), self._context, lambda v: v[0])

    @overload
    def call_batch(self, method: str, size: int, /, *args: Any, **kwargs: Any) -> FutureSequence[Any]: ...
    @overload
    def call_batch(
        self, method: Callable[P, Any], size: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[Any]: ...
    def call_batch(self, method: Method, size: int, /, *args: Any, **kwargs: Any) -> FutureSequence[Any]:
        """Split the arguments that have `size` items over the workers. The result is the sequence of all items.

        Raises:
            ValueError: no argument is splittable, or a splittable argument does not have `size` items, or a train role
                has more ranks than items (all of its ranks enter collectives).
        """
        export = self._find(method)
        for value in (*args, *kwargs.values()):
            if is_splittable(value) and len(value) != size:
                raise ValueError(f"{self._role}.{export.name}: size is {size}, but an argument has {len(value)} items")
        calls, lengths = self._scatter(export, (args, kwargs))
        return FutureSequence(calls, lengths, self._context)

    # --- the trainer's role group

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        exports = self._entry.exports
        export = exports.get(name)
        if export is None or export.spec is None:
            raise AttributeError(self._unknown(name, [n for n, e in exports.items() if e.spec]))
        return functools.partial(self._invoke, export)

    def _invoke(self, export: Export, /, *args: Any, **kwargs: Any) -> Any:
        spec = export.spec
        assert spec is not None
        share = (args, kwargs)
        if spec.pre_func is not None:
            share = (_prepared(spec.pre_func(*args, **kwargs), f"{self._role}.{export.name}"), {})
        future = self._dispatch(export, spec, share)
        if not spec.blocking:
            return future
        while True:
            try:
                return future.result(spec.timeout if spec.is_async else None)
            except WorkerTimeout as late:
                if not spec.end_on_timeout:
                    raise
                # The master kills late workers, as if they had died. Idempotent calls then go to the replacements.
                members, directory = self._entry.members, self._context.directory
                for role, rank, attempt in late.missing:
                    if members[rank].attempt == attempt:
                        directory.report_dead(members[rank])
                    self._context.emit("hung", (role, rank, attempt, str(late)))
                if not (export.idempotent and directory.may_return(members[0])):
                    raise

    def _dispatch(self, export: Export, spec: CallSpec, share: Share) -> Future[Any]:
        members, mode = self._some_members(export), spec.mode
        if isinstance(mode, NdDispatch):
            return self._call_mesh(export, mode.mesh, share)
        args, kwargs = share
        splits = mode is Dispatch.AUTO and any(is_splittable(value) for value in (*args, *kwargs.values()))
        if splits or mode is Dispatch.DP_COMPUTE_PROTO:
            calls, _ = self._scatter(export, share)
        elif mode in (Dispatch.ALL_TO_ALL, Dispatch.DP_COMPUTE):
            calls = self._deal(export, members, self._items_per_worker(export, share))
        else:
            calls = self._broadcast(export, members[:1] if mode is Dispatch.RANK_ZERO else members, share)
        future = Future if spec.blocking else ReferenceFuture
        return future(calls, self._context, functools.partial(_finished, spec, calls))

    # --- sending

    def _some_members(self, export: Export) -> list[Member]:
        if not self._entry.members:
            raise ValueError(f"{self._role} has no worker, so {export.name} cannot be called")
        return self._members

    def _find(self, method: Method) -> Export:
        name = method if isinstance(method, str) else method.__name__
        export = self._entry.exports.get(name)
        if export is None and self._entry.members:
            raise AttributeError(self._unknown(name, list(self._entry.exports)))
        return export or Export(name)  # the group is empty, so nothing is called

    def _unknown(self, name: str, known: list[str]) -> str:
        listed = ", ".join(sorted(known)) or "nothing"
        return f"{self._role} ({self._entry.implementation}) exports no method {name!r}; it exports {listed}"

    def _broadcast(self, export: Export, members: list[Member], share: Share) -> list[Pending]:
        return self._deal(export, members, [self._stored(share, len(members))] * len(members))

    def _scatter(self, export: Export, share: Share) -> tuple[list[Pending], list[int]]:
        members = self._some_members(export)
        # An idempotent call may be sent to one worker alone, so it enters no collective and ranks may be idle in it.
        needs_all = self._entry.kind == "train" and not export.idempotent
        parts, sizes = self._cut(export, share, len(members), needs_all)
        # With fewer items than workers the last workers get no item and are not called.
        sizes = [size for size in sizes if size]
        return self._deal(export, members[: len(sizes)], parts[: len(sizes)]), sizes

    def _deal(self, export: Export, members: list[Member], shares: list[Share]) -> list[Pending]:
        context = self._context
        return [Pending(context, member, export, share) for member, share in zip(members, shares, strict=True)]

    def _cut(self, export: Export, share: Share, workers: int, needs_all: bool) -> tuple[list[Share], list[int]]:
        """Return each worker's arguments and number of items.

        Raises:
            ValueError: `needs_all` is True and there are fewer items than workers.
        """
        name = f"{self._role}.{export.name}"
        # Arguments that are sent whole stay marked. Otherwise a list among them would be split.
        args, kwargs = _map_all(share, lambda v: v if is_splittable(v) else Replicated(self._reference(v, workers)))
        chunks, length = shard_arguments(args, kwargs, workers, name)
        if needs_all and length < workers:
            raise ValueError(
                f"{name} got {length} items for {workers} ranks, and every rank must take part; "
                "give at least one item per rank, or replicate(x) to send it whole"
            )
        return chunks, chunk_sizes(length, workers)

    def _reference(self, value: Any, receivers: int) -> Any:
        value = unwrap(value)
        if receivers > 1 and payload_bytes(value) > _SHARE_ABOVE_BYTES:
            return self._context.transport.put(value)
        return value

    def _stored(self, share: Share, receivers: int) -> Share:
        """Return the arguments, with large ones replaced by references that are stored once for all receivers."""
        return _map_all(share, lambda value: self._reference(value, receivers))

    def _items_per_worker(self, export: Export, share: Share) -> list[Share]:
        """Return each worker's arguments, given arguments that have one item per worker."""
        args, kwargs = share
        count = len(self)
        for label, value in [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]:
            if isinstance(value, Future):
                value.__reduce__()  # raises
            if not isinstance(value, list | tuple) or len(value) != count:
                size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
                raise ValueError(
                    f"{self._role}.{export.name}: {label} is a {type(value).__name__}{size}, not a list with one item "
                    f"for each of the {count} workers; pass such a list, or register the method with "
                    "Dispatch.ONE_TO_ALL to send arguments whole"
                )
        return [_map_all(share, operator.itemgetter(i)) for i in range(count)]

    # --- meshes

    def _call_mesh(self, export: Export, mesh: str, share: Share) -> Future[Any]:
        positions = self._mesh(mesh)
        ranks = max(rank for rank, _ in positions) + 1
        chunks, _ = self._cut(export, share, ranks, needs_all=True)
        peers = Counter(rank for rank, _ in positions)
        stored = [self._stored(chunk, peers[rank]) for rank, chunk in enumerate(chunks)]
        calls = self._deal(export, self._members, [stored[rank] for rank, _ in positions])
        # Peers of a data-parallel rank return the same items, so that only one result of each rank is joined.
        collected = [i for _, i in sorted((rank, i) for i, (rank, collects) in enumerate(positions) if collects)]
        return Future(calls, self._context, lambda values: join_results([values[i] for i in collected], calls))

    def _mesh(self, mesh: str) -> list[tuple[int, bool]]:
        """Return (data-parallel rank, is_collect) of each worker. The workers are called once per mesh."""
        if mesh not in self._positions:
            positions = self.call("mesh_position", mesh).result()
            ranks = sorted(rank for rank, collects in positions if collects)
            if ranks != list(range(max(rank for rank, _ in positions) + 1)):
                raise ValueError(
                    f"mesh {mesh!r} of {self._role}: the workers' data-parallel ranks are {[r for r, _ in positions]}, "
                    f"and is_collect is True for ranks {ranks}; each rank from 0 needs exactly one such worker"
                )
            self._positions[mesh] = positions
        return self._positions[mesh]


class WorkerHandle:
    """Handle of one worker with the interface of a Ray actor handle.

    `handle.update.remote(batch)` sends the arguments whole and returns the reference of the result. On Ray, `ray.get`
    accepts the reference. If the worker is replaced, calls go to the replacement.
    """

    def __init__(self, group: RoleGroup[Any]) -> None:
        self._group = group

    def __getattr__(self, name: str) -> "WorkerMethod":
        if name.startswith("_"):
            raise AttributeError(name)
        self._group._find(name)
        return WorkerMethod(self._group, name)

    def __repr__(self) -> str:
        return f"WorkerHandle({self._group[0].name})"


class WorkerMethod:
    """A method of a WorkerHandle."""

    def __init__(self, group: RoleGroup[Any], name: str) -> None:
        self._group = group
        self._name = name

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method without waiting, and return the reference of its result."""
        return self._group.call(self._name, *args, **kwargs).calls[0].reference


class WorkerGroup(RoleGroup[W]):
    """A role group that checks the class of its workers. Methods decorated with `@register` are its attributes.

    If a trainer declares `actor: WorkerGroup[Actor]` in its class, type checkers check its calls.

    Args:
        role: name of the role.
        cls: the class whose registered methods the workers must have. None skips the check.
        optional: return an empty group if the job does not have the role.

    Raises:
        ValueError: the job does not have the role and optional is False, or its workers lack a method of `cls`.
    """

    def __init__(self, role: str, cls: type[W] | None = None, optional: bool = False) -> None:
        super().__init__(role, optional)
        exports = [export_of(getattr(cls, name, None)) for name in dir(cls)]
        required = {export.name for export in exports if export and export.spec}
        missing = sorted(required - set(self._entry.exports))
        if missing and self._entry.members:
            raise ValueError(
                f"the workers of {self._role} are {self._entry.implementation}, which has no {', '.join(missing)}; "
                f"pass their class instead of {cls}"
            )


def notify_job_end(*roles: str) -> None:
    """Call `job_end` on all workers of the roles and wait for them. Roles that the job does not have are skipped."""
    groups = [RoleGroup[Any](role, optional=True) for role in roles]
    for future in [group.call("job_end") for group in groups]:
        future.result()


def _map_all(share: Share, change: Callable[[Any], Any]) -> Share:
    """Apply a function to every argument."""
    args, kwargs = share
    return tuple(map(change, args)), {key: change(value) for key, value in kwargs.items()}


def _finished(spec: CallSpec, calls: list[Pending], values: list[Any]) -> Any:
    if spec.post_func is not None:
        return spec.post_func(values)
    if spec.mode is Dispatch.DP_COMPUTE_PROTO:
        return join_results(values, calls)
    return values[0] if spec.mode is Dispatch.RANK_ZERO else values


def _prepared(sent: Any, name: str) -> tuple[Any, ...]:
    """Return the return value of a pre_func as positional arguments."""
    if isinstance(sent, tuple) and len(sent) == 2 and isinstance(sent[0], tuple) and isinstance(sent[1], dict):
        raise ValueError(
            f"pre_func of {name} returned a pair (args, kwargs), as in DLRover; core calls it with the arguments, "
            "without the group: return the arguments to send, as a tuple or as a single value"
        )
    return sent if isinstance(sent, tuple) else (sent,)
