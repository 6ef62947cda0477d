"""Exports of a workload: the call description that a decorator attaches to a method, and its discovery.

Callers receive the descriptions when the job starts, so a caller never needs to import the workload's class (and torch
with it).
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
    """Dispatch mode: distribution of a call's arguments over the workers, and the form of the result.

    Splitting cuts lists, arrays and batches into contiguous chunks whose lengths differ by at most one item. All other
    arguments are sent whole to every worker. Nothing is padded.
    """

    AUTO = "arguments are split if at least one is splittable, else sent whole; returns the list of results"
    ONE_TO_ALL = "every worker gets every argument whole; returns the list of results"
    RANK_ZERO = "only the first worker gets the arguments, whole; returns its result"
    ALL_TO_ALL = "every argument is a list or tuple with one item per worker; returns the list of results"
    DP_COMPUTE = "the same as ALL_TO_ALL"
    DP_COMPUTE_PROTO = "arguments are split; returns the joined results"


@dataclass(frozen=True)
class NdDispatch:
    """Dispatch mode over the data-parallel ranks of a mesh; see `nd_compute`."""

    mesh: str


def nd_compute(mesh: str) -> NdDispatch:
    """Return a dispatch mode that splits arguments over the data-parallel ranks of a mesh and joins the results.

    Each worker registers its position with `register_mesh`. Workers of one data-parallel rank (tensor or sequence
    parallel peers) get the same chunk, which is stored once. The result of a data-parallel rank is the one of its
    single worker with `is_collect=True`.
    """
    return NdDispatch(mesh)


Mode = Dispatch | NdDispatch


@dataclass(frozen=True)
class CallSpec:
    """Call options of a method: dispatch mode, blocking, timeout and hooks."""

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
            raise ValueError(f"dispatch_mode={self.mode!r} is invalid; set one of {modes}, or nd_compute(mesh)")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float) or self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout!r}; set a number of seconds above 0")
        if self.is_async and not self.blocking:
            raise ValueError("is_async=True waits with a timeout, blocking=False does not wait; set only one of them")
        if self.end_on_timeout and not self.is_async:
            raise ValueError("end_on_timeout=True has no effect without a timeout; set is_async=True too")
        for name, function in (("pre_func", self.pre_func), ("post_func", self.post_func)):
            if function is not None and not callable(function):
                raise ValueError(f"{name}={function!r} is not callable; set a function or leave it out")


@dataclass(frozen=True)
class Export:
    """Description of one exported method.

    `spec` holds the call options of role groups. It is None for a method bound by `@rpc`, whose stub selects the
    workers in its body.
    """

    name: str
    spec: CallSpec | None = None
    stub: Callable[..., Any] | None = None
    idempotent: bool = False
    replay: Replay | None = None
    concurrent: bool = False
    """True if calls may run concurrently: the method is async and its role has a concurrency above 1."""

    def __post_init__(self) -> None:
        if self.replay not in (None, "last"):
            raise ValueError(f"replay={self.replay!r} is invalid; set replay='last' (repeat the last call) or omit it")


@dataclass(frozen=True, eq=False)
class Replicated:
    """Wrapper of a splittable argument that is sent whole to every worker; see `replicate`."""

    value: Any


def replicate(value: T) -> T:
    """Mark a splittable argument (list, array, Batch) to be sent whole to every worker."""
    replicated: Any = value
    if not isinstance(value, Replicated):
        replicated = Replicated(value)
    return replicated


_exported_functions: list[tuple[Export, Callable[..., Any]]] = []


def marks(export: Export, everywhere: bool = False) -> Callable[[F], F]:
    """Return a decorator that attaches an export to a function, for `exports_of`.

    Args:
        export: the description. If its name is empty, it gets the name of the function.
        everywhere: export the function in every workload of the process.
    """

    def mark(function: F) -> F:
        named = replace(export, name=export.name or function.__name__)
        setattr(function, _MARK, named)
        if everywhere:
            _exported_functions.append((named, function))
        return function

    return mark


class BoundStub:
    """Result of `rpc(function)`, which has two meanings.

    If `function` is a stub, this object is a decorator that binds a method to it. If a function at the top level of a
    module has the bare decorator `@rpc`, this object stands for the function, exported under its own name.
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
        """Export of the function, or None if the function is a stub."""
        # A bare @rpc replaces the function in its module by this object. A stub keeps its name there.
        names = getattr(self.function, "__globals__", {})
        return self._bare if names.get(self.function.__name__) is self else None


def export_of(function: Any) -> Export | None:
    """Return the export that a decorator attached to a function, or None."""
    entry = function.export if isinstance(function, BoundStub) else getattr(function, _MARK, None)
    return entry if isinstance(entry, Export) else None


def exports_of(
    instance: Any, module: str = "", others: Iterable[tuple[Export, Any]] = ()
) -> dict[str, tuple[Export, Callable[..., Any]]]:
    """Return all exports of a workload as name -> (export, function).

    The exports are the methods of the workload, @rpc functions at the top level of its class's module and of the entry
    point's `module`, functions exported with `everywhere`, and `others`. A public method without a decorator is called
    on all workers with its arguments whole.

    Raises:
        ValueError: two methods of one workload share a name, or a stub and its method have different parameters.
    """
    exports: dict[str, tuple[Export, Callable[..., Any]]] = {}
    cls = type(instance)
    modules = dict.fromkeys([cls.__module__, module or cls.__module__])
    # Looked up on the class: evaluating a property of a partly constructed object would run user code.
    marked = {name: export_of(inspect.getattr_static(cls, name)) for name in dir(cls)}
    methods = [(entry, getattr(instance, name)) for name, entry in marked.items() if entry]
    values = [value for name in modules if name in sys.modules for value in vars(sys.modules[name]).values()]
    functions = [(export_of(f), getattr(f, "function", f)) for f in values if isinstance(f, FunctionType | BoundStub)]
    for entry, function in [*methods, *functions, *_exported_functions, *others]:
        if entry is None:
            continue
        if entry.spec and entry.name in RESERVED_NAMES:
            raise ValueError(f"{cls.__qualname__}.{entry.name}: role groups reserve the name {entry.name}; rename it")
        known = exports.get(entry.name)
        if known is not None and known[1] != function:
            raise ValueError(
                f"{cls.__module__}.{cls.__qualname__} exports {entry.name!r} twice "
                f"({known[1].__name__} and {function.__name__}); rename one"
            )
        _check_stub(entry, function, cls)
        exports[entry.name] = (entry, function)
    plain = CallSpec(Dispatch.ONE_TO_ALL)
    undecorated = [name for name in dir(cls) if _is_plain_method(cls, name) and name not in exports]
    return exports | {name: (Export(name, plain), getattr(instance, name)) for name in undecorated}


def _is_plain_method(cls: type, name: str) -> bool:
    """True for a public method of a user's class that no base class has decorated."""
    # An undecorated override of a decorated method would lose the options of the decorator.
    owners = [base for base in cls.__mro__ if name in vars(base)]
    return (
        not name.startswith("_")
        and name not in RESERVED_NAMES | {"run"}
        and isinstance(vars(owners[0])[name], FunctionType | staticmethod | classmethod)
        and not any(base.__module__.startswith("core.") or export_of(vars(base)[name]) for base in owners)
    )


RESERVED_NAMES = frozenset({"call", "call_rank0", "call_batch", "on", "world_size"})
"""Attributes of a role group. A worker's method with such a name could not be called through the group."""


def _check_stub(entry: Export, function: Callable[..., Any], cls: type) -> None:
    if entry.stub is None:
        return
    stub_parameters = [(p.name, p.kind) for p in inspect.signature(entry.stub).parameters.values()]
    method_parameters = [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]
    if stub_parameters != method_parameters:
        raise ValueError(
            f"stub {entry.stub.__module__}.{entry.stub.__name__}{inspect.signature(entry.stub)} does not match "
            f"{cls.__module__}.{cls.__qualname__}.{function.__name__}{inspect.signature(function)}; "
            "give both the same parameters"
        )
