"""What a workload lets others call: the description that a decorator attaches to a method, and how it is found.

The description travels to the callers when the job starts, so that a caller never needs to import the workload's class
(and with it torch).
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from types import FunctionType
from typing import Any, Literal, TypeVar

Replay = Literal["last"]
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_MARK = "__troupe_export__"


class Dispatch(Enum):
    """How the arguments of a call are given out to the workers, and what returns.

    To split is to cut lists, arrays and batches into contiguous chunks that differ by at most one item; everything else
    goes whole to everybody. Nothing is padded.
    """

    AUTO = "arguments are split if one of them can be, else whole; returns the list of the workers' results"
    ONE_TO_ALL = "every worker gets every argument whole; returns the list of their results"
    RANK_ZERO = "the first worker alone gets the arguments, whole; returns its result"
    ALL_TO_ALL = "every argument is a list or tuple with one item for each worker; returns the list of their results"
    DP_COMPUTE = "the same as ALL_TO_ALL"
    DP_COMPUTE_PROTO = "arguments are split; returns the results joined"


@dataclass(frozen=True)
class NdDispatch:
    """Made by `nd_compute`."""

    mesh: str


def nd_compute(mesh: str) -> NdDispatch:
    """Split over the data-parallel ranks of a mesh, that each worker has registered by `register_mesh`; returns joined.

    Workers of one data-parallel rank (tensor or sequence parallel peers) get the same chunk, which is stored once. The
    answer of a data-parallel rank is that of its one worker with `is_collect`.
    """
    return NdDispatch(mesh)


Mode = Dispatch | NdDispatch


@dataclass(frozen=True)
class CallSpec:
    """How a group calls a method."""

    mode: Mode
    blocking: bool = True
    is_async: bool = False
    timeout: float = 10.0
    end_on_timeout: bool = False
    pre_func: Callable[..., Any] | None = None
    post_func: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, Mode):
            modes = ", ".join(f"Dispatch.{mode.name}" for mode in Dispatch)
            raise ValueError(f"dispatch_mode={self.mode!r}; give one of {modes}, or nd_compute(mesh)")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout!r}; set a number of seconds above 0")
        if self.is_async and not self.blocking:
            raise ValueError("is_async=True waits with a timeout, blocking=False does not wait; set one of the two")
        if self.end_on_timeout and not self.is_async:
            raise ValueError("end_on_timeout=True has no effect without a timeout; set is_async=True too")
        for name, function in (("pre_func", self.pre_func), ("post_func", self.post_func)):
            if function is not None and not callable(function):
                raise ValueError(f"{name}={function!r} cannot be called; give a function or leave it out")


@dataclass(frozen=True)
class Export:
    """One method that others may call: under which name, and how.

    `spec` says how groups call it; it is None for methods bound by `@rpc`: there the stub's body says who is called.
    """

    name: str
    spec: CallSpec | None = None
    stub: Callable[..., Any] | None = None
    idempotent: bool = False
    replay: Replay | None = None
    concurrent: bool = False
    """Whether calls to it may run beside others: it is async, and its role asks for concurrency."""

    def __post_init__(self) -> None:
        if self.replay not in (None, "last"):
            raise ValueError(f"replay={self.replay!r}; set replay='last' (repeat the last call) or leave it out")


@dataclass(frozen=True, eq=False)
class Replicated:
    """A splittable argument that goes whole to every worker; made by `replicate`."""

    value: Any


def replicate(value: T) -> T:
    """Mark a splittable argument (list, array, Batch) to be sent whole to every worker."""
    whole: Any = value if isinstance(value, Replicated) else Replicated(value)
    return whole


_exported_functions: list[tuple[Export, Callable[..., Any]]] = []


def marks(export: Export, everywhere: bool = False) -> Callable[[F], F]:
    """A decorator that lets a function be found by `exports_of`; `everywhere`: in every workload of its process.

    An export without a name gets the function's.
    """

    def mark(function: F) -> F:
        named = export if export.name else replace(export, name=function.__name__)
        setattr(function, _MARK, named)
        if everywhere:
            _exported_functions.append((named, function))
        return function

    return mark


class BoundStub:
    """The result of `@rpc(function)`: a decorator for which the function is a stub. Where the function itself has the
    bare `@rpc`, at the top level of a module, the function, exported under its own name.
    """

    def __init__(self, function: Callable[..., Any], mark: Callable[..., Any], bare: Export) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self._mark = mark
        self._bare = bare

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._mark if self.export is None else self.function)(*args, **kwargs)

    @property
    def export(self) -> Export | None:
        """Export of the function, or None if it is a stub: then its module has the function under its name."""
        names = getattr(self.function, "__globals__", {})
        return self._bare if names.get(self.function.__name__) is self else None


def export_of(function: Any) -> Export | None:
    """What a decorator has said of a function."""
    entry = function.export if isinstance(function, BoundStub) else getattr(function, _MARK, None)
    return entry if isinstance(entry, Export) else None


def exports_of(
    instance: Any, module: str = "", others: Iterable[tuple[Export, Any]] = ()
) -> dict[str, tuple[Export, Callable[..., Any]]]:
    """Everything callable of a workload: its own methods, @rpc functions at the top level of its class's module and of
    the entry point's `module`, functions exported anywhere, and `others`. A public method without a decorator is called
    on all workers, with its arguments whole.

    Raises:
        ValueError: two methods of one workload share a name, or a stub's parameters are not its method's.
    """
    found: dict[str, tuple[Export, Callable[..., Any]]] = {}
    cls = type(instance)
    modules = dict.fromkeys([cls.__module__, module or cls.__module__])
    # Looked up on the class: evaluating a property of a half-made object would run user code.
    marked = {name: export_of(inspect.getattr_static(cls, name)) for name in dir(cls)}
    methods = [(entry, getattr(instance, name)) for name, entry in marked.items() if entry]
    beside = [value for name in modules if name in sys.modules for value in vars(sys.modules[name]).values()]
    functions = [(export_of(f), getattr(f, "function", f)) for f in beside if isinstance(f, FunctionType | BoundStub)]
    for entry, function in [*methods, *functions, *_exported_functions, *others]:
        if entry is None:
            continue
        if entry.spec and entry.name in RESERVED_NAMES:
            raise ValueError(
                f"{cls.__qualname__}.{entry.name}: role groups have a {entry.name} of their own; rename it"
            )
        known = found.get(entry.name)
        if known is not None and known[1] != function:
            raise ValueError(
                f"{cls.__module__}.{cls.__qualname__} exports {entry.name!r} twice "
                f"({known[1].__name__} and {function.__name__}); rename one"
            )
        _check_stub(entry, function, cls)
        found[entry.name] = (entry, function)
    plain = CallSpec(Dispatch.ONE_TO_ALL)
    undecorated = [name for name in dir(cls) if _is_plain_method(cls, name) and name not in found]
    return found | {name: (Export(name, plain), getattr(instance, name)) for name in undecorated}


def _is_plain_method(cls: type, name: str) -> bool:
    """True for a public method of the user's, if no base class has decorated it: an override would lose its options."""
    owners = [base for base in cls.__mro__ if name in vars(base)]
    return (
        not name.startswith("_")
        and name not in RESERVED_NAMES | {"run"}
        and isinstance(vars(owners[0])[name], FunctionType | staticmethod | classmethod)
        and not any(base.__module__.startswith("core.") or export_of(vars(base)[name]) for base in owners)
    )


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
            f"{cls.__module__}.{cls.__qualname__}.{function.__name__}{inspect.signature(function)}; "
            "give both the same parameters"
        )
