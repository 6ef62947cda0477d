"""What a workload lets others call: the description that a decorator attaches to a method, and how it is found.

The description travels to the callers when the job starts, so that a caller never needs to import the workload's class
(and with it torch).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

Target = Literal["ALL", "RANK0"]
Replay = Literal["last"]
T = TypeVar("T")

_MARK = "__troupe_export__"


@dataclass(frozen=True)
class CallSpec:
    """How the trainer's role group calls a method."""

    blocking: bool = True
    is_async: bool = False
    timeout: float = 10.0
    target: Target = "ALL"
    auto_shard: bool = True
    pre_func: Callable[..., Any] | None = None
    post_func: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.target not in ("ALL", "RANK0"):
            raise ValueError(f"target={self.target!r}; set target='ALL' (every worker) or 'RANK0' (the first)")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout!r}; set a number of seconds above 0")
        if self.is_async and not self.blocking:
            raise ValueError("is_async=True waits with a timeout, blocking=False does not wait; set one of the two")
        for name, function in (("pre_func", self.pre_func), ("post_func", self.post_func)):
            if function is not None and not callable(function):
                raise ValueError(f"{name}={function!r} cannot be called; give a function or leave it out")


@dataclass(frozen=True)
class Export:
    """One method that others may call: under which name, where it is, and how.

    `spec` says how role groups call it, `dispatch` (a worker_group.DispatchSpec) how worker groups do; both are None
    for methods bound by `@rpc`: there the stub's body says who is called.
    """

    name: str
    attribute: str
    spec: CallSpec | None = None
    stub: Callable[..., Any] | None = None
    idempotent: bool = False
    replay: Replay | None = None
    dispatch: Any = None
    concurrent: bool = False
    """Whether calls to it may run beside others: it is async, and its role asks for concurrency."""

    def __post_init__(self) -> None:
        if self.replay not in (None, "last"):
            raise ValueError(f"replay={self.replay!r}; set replay='last' (repeat the last call) or leave it out")


class Replicated:
    """A splittable argument that goes whole to every worker; made by `replicate`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def replicate(value: T) -> T:
    """Mark a splittable argument (list, array, Batch) to be sent whole to every worker."""
    whole: Any = value if isinstance(value, Replicated) else Replicated(value)
    return whole


_exported_functions: list[tuple[Export, Callable[..., Any]]] = []


def attach(function: Callable[..., Any], export: Export, everywhere: bool = False) -> None:
    """Let a function be found by `exports_of`; `everywhere`: in every workload of its process."""
    setattr(function, _MARK, export)
    if everywhere:
        _exported_functions.append((export, function))


def export_of(function: Any) -> Export | None:
    """What a decorator has said of a function."""
    entry = getattr(function, _MARK, None)
    return entry if isinstance(entry, Export) else None


def exports_of(instance: Any) -> dict[str, tuple[Export, Callable[..., Any]]]:
    """Everything callable of a workload: its own methods, its module's @rpc functions, functions exported anywhere.

    Raises:
        ValueError: two methods of one workload share a name, or a stub's parameters are not its method's.
    """
    found: dict[str, tuple[Export, Callable[..., Any]]] = {}
    cls = type(instance)
    candidates: list[tuple[Export, Callable[..., Any]]] = []
    for attribute in dir(cls):
        # Looked up on the class: evaluating a property of a half-made object would run user code.
        function = inspect.getattr_static(cls, attribute)
        entry = export_of(function)
        if entry is not None:
            candidates.append((replace(entry, attribute=attribute), getattr(instance, attribute)))
    module = inspect.getmodule(cls)
    for function in vars(module).values() if module else ():
        entry = export_of(function)
        if entry is not None and inspect.isfunction(function) and function.__module__ == cls.__module__:
            candidates.append((entry, function))
    for entry, function in [*candidates, *_exported_functions]:
        if (entry.spec or entry.dispatch) and entry.name in RESERVED_NAMES:
            raise ValueError(
                f"{cls.__qualname__}.{entry.name}: role groups have a {entry.name} of their own; rename it"
            )
        known = found.get(entry.name)
        if known is not None and known[1] != function:
            raise ValueError(
                f"{cls.__module__}.{cls.__qualname__} exports {entry.name!r} twice "
                f"({known[0].attribute} and {entry.attribute}); rename one"
            )
        _check_stub(entry, function, cls)
        found[entry.name] = (entry, function)
    return found


RESERVED_NAMES = frozenset({"call", "call_rank0", "call_batch", "on", "world_size"})
"""Names that a role group has for itself, so that no method of a worker could be reached by them."""


def _check_stub(entry: Export, function: Callable[..., Any], cls: type) -> None:
    if entry.stub is None:
        return
    wanted = [(p.name, p.kind) for p in inspect.signature(entry.stub).parameters.values()]
    given = [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]
    if wanted != given:
        raise ValueError(
            f"stub {entry.stub.__module__}.{entry.stub.__name__}{inspect.signature(entry.stub)} does not fit "
            f"{cls.__module__}.{cls.__qualname__}.{entry.attribute}{inspect.signature(function)}; "
            "give both the same parameters"
        )
