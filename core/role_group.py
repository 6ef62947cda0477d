"""RoleGroup: all workers of a role, seen as one. The one place that splits a call, sends it, and gathers answers."""

from collections.abc import Callable, Iterator
from typing import Any

from core.context import WorkloadContext, current
from core.errors import WorkerTimeout
from core.futures import Future, FutureSequence, Pending, whole
from core.invocation import Export
from core.members import Member, RoleEntry
from core.roles import Role
from core.sharding import chunk_sizes, is_splittable, payload_bytes, shard_arguments, unwrap

_SHARE_ABOVE_BYTES = 100_000
"""Arguments above this size are stored once instead of once per receiver; below, Ray sends them within the call."""


class RoleGroup:
    """The workers of one role of the job that is running.

    It has a length, members, and iterates over them; every other name is a method of the workers.

    - `group.update(batch)`: as the method's `@trainer_invocation` says.
    - `group.call(stub, ...)`: to all, whole; `group.call_rank0(...)`: to the first;
      `group.call_batch(stub, size, ...)`: split over all.

    Raises:
        ValueError: the job has no such role, unless optional=True (then the group is empty).
    """

    def __init__(self, role: str, optional: bool = False, context: WorkloadContext | None = None) -> None:
        self._role = Role(role)
        self._fixed_context = context
        if not optional and self._role not in self._context.directory:
            raise ValueError(f"the job has no role {self._role}; it has {sorted(self._context.directory)}")

    @property
    def _context(self) -> WorkloadContext:
        return self._fixed_context or current()

    @property
    def _entry(self) -> RoleEntry:
        # Looked up at each use: a group follows the replacement of a worker.
        return self._context.directory.get(self._role) or RoleEntry(self._role, "run", [])

    def __len__(self) -> int:
        return len(self._entry.members)

    def __getitem__(self, index: Any) -> Any:
        return self._entry.members[index]

    def __iter__(self) -> Iterator[Member]:
        return iter(self._entry.members)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._role}, {len(self)} workers)"

    # --- remote-call stubs

    def call(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[list[Any]]":
        """Call every worker with the same arguments; the result is a list in rank order."""
        export = self._find(method)
        members = self._entry.members
        return Future(self._broadcast(export, members, args, kwargs), self._context)

    def call_rank0(self, method: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Call the first worker only; the result is its value."""
        export = self._find(method)
        first = self._some_members(export)[:1]
        return Future(self._broadcast(export, first, args, kwargs), self._context, lambda v: v[0])

    def call_batch(
        self, method: str | Callable[..., Any], size: int, /, *args: Any, **kwargs: Any
    ) -> FutureSequence[Any]:
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

        def invoke(*args: Any, **kwargs: Any) -> Any:
            return self._invoke(export, args, kwargs)

        invoke.__name__ = name
        return invoke

    def _may_call(self, export: Export) -> bool:
        return export.spec is not None

    def _invoke(self, export: Export, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        spec = export.spec
        assert spec is not None
        if spec.pre_func is not None:
            sent = spec.pre_func(*args, **kwargs)
            args, kwargs = sent if isinstance(sent, tuple) else (sent,), {}
        members = self._some_members(export)
        if spec.target == "RANK0":
            calls = self._broadcast(export, members[:1], args, kwargs)
        elif spec.auto_shard and any(is_splittable(value) for value in (*args, *kwargs.values())):
            calls, _ = self._scatter(export, args, kwargs)
        else:
            calls = self._broadcast(export, members, args, kwargs)

        def finish(values: list[Any]) -> Any:
            value = spec.post_func(values) if spec.post_func is not None else values
            return value[0] if spec.target == "RANK0" and spec.post_func is None else value

        future = Future(calls, self._context, finish)
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
        return self._entry.members

    def _find(self, method: str | Callable[..., Any]) -> Export:
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
        members = self._some_members(export)
        chunks, sizes = self._cut(export, args, kwargs, len(members), self._entry.kind == "train")
        # With fewer items than workers the last ones have nothing to do and are not called.
        sizes = [size for size in sizes if size]
        return [self._send(m, export, *chunk) for m, chunk in zip(members, chunks[: len(sizes)], strict=False)], sizes

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
        value = whole(unwrap(value))
        if receivers > 1 and payload_bytes(value) > _SHARE_ABOVE_BYTES:
            return self._context.transport.put(value)
        return value

    def _send(self, member: Member, export: Export, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending:
        return Pending(self._context, member, export, args, kwargs)
