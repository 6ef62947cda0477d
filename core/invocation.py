"""How a method of a workload may be called from outside: `@trainer_invocation` and `@rpc`.

Both decorators only attach a description; the function itself stays what it was. The description travels to the
callers when the job starts, so that a caller never needs to import the workload's class (and with it torch).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, overload

from core.names import hint_after

F = TypeVar("F", bound=Callable[..., Any])
Target = Literal["ALL", "RANK0"]
Replay = Literal["last"]

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
    slot: int = -1
    """Its number in its host; see `Host.call_slot`."""

    def __post_init__(self) -> None:
        if self.replay not in (None, "last"):
            raise ValueError(f"replay={self.replay!r}; set replay='last' (repeat the last call) or leave it out")


class Replicated:
    """A splittable argument that goes whole to every worker; made by `replicate`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def replicate(value: Any) -> Any:
    """Mark a splittable argument (list, array, Batch) to be sent whole to every worker."""
    return value if isinstance(value, Replicated) else Replicated(value)


@overload
def trainer_invocation(function: F, /) -> F: ...
@overload
def trainer_invocation(
    *,
    blocking: bool = True,
    is_async: bool = False,
    timeout: float = 10.0,
    target: Target = "ALL",
    auto_shard: bool = True,
    pre_func: Callable[..., Any] | None = None,
    post_func: Callable[[Any], Any] | None = None,
    idempotent: bool = False,
    replay: Replay | None = None,
) -> Callable[[F], F]: ...
def trainer_invocation(
    function: Any = None, /, *, idempotent: bool = False, replay: Replay | None = None, **options: Any
) -> Any:
    """Make a method callable through the trainer's role groups, `self.RG_ACTOR.update(batch)`.

    Args:
        blocking: wait for the results; False returns a Future at once.
        is_async: wait with `timeout` for all targets, and raise TimeoutError naming the ranks that are missing.
        timeout: seconds, only with is_async. Workers that have not answered by then are taken for hung, and ended.
        target: "ALL" workers, or "RANK0" alone, which returns the single value instead of a list.
        auto_shard: split lists, arrays and batches over the workers; everything else goes whole to all.
        pre_func: runs on the caller's side; what it returns is sent (a tuple is several arguments).
        post_func: runs on the caller's side over the list of results; what it returns is the result.
        idempotent: a call that a dying instance of a `run` role did not answer may be sent again to its replacement.
        replay: "last" repeats the last successful call in a replacement, before it is given any work.

    Raises:
        ValueError: an option has a value that cannot work; raised when the class is defined.
    """
    unknown = sorted(set(options) - set(CallSpec.__dataclass_fields__))
    if unknown:
        known = sorted({*CallSpec.__dataclass_fields__, "idempotent", "replay"})
        raise ValueError(
            f"trainer_invocation has no {unknown}; it knows {known}" + hint_after("trainer_invocation", *unknown)
        )
    spec = CallSpec(**options)
    mark = marker(lambda name: Export(name, name, spec, idempotent=idempotent, replay=replay))
    return mark if function is None else mark(function)


def marker(describe: Callable[[str], Export]) -> Callable[[F], F]:
    """A decorator that attaches what `describe` says of a method's name, and checks it at once."""

    def mark(method: F) -> F:
        setattr(method, _MARK, describe(method.__name__))
        return method

    describe("checked")
    return mark


_exported_functions: list[tuple[Export, Callable[..., Any]]] = []


def rpc(name: Any = None, /, *, export: bool = False, idempotent: bool = False, replay: Replay | None = None) -> Any:
    """Bind a method to a remote-call stub: `@rpc(remote_call.actor_forward)`.

    The name under which the method can be called is the stub's, a string, or the method's own (`@rpc`; outside of a
    class `@rpc()`, since a bare `@rpc` would be taken for the use of a stub).
    `export=True` makes a function outside of any class callable in every workload of its process. `idempotent` and
    `replay` are those of `trainer_invocation`.

    Raises:
        ValueError: `name` is neither a stub nor a string.
    """

    def mark(method: Callable[..., Any], stub: Callable[..., Any] | None, label: str) -> Callable[..., Any]:
        entry = Export(label, method.__name__, None, stub, idempotent, replay)
        setattr(method, _MARK, entry)
        if export:
            _exported_functions.append((entry, method))
        return method

    if name is None or isinstance(name, str):
        return lambda method: mark(method, None, name or method.__name__)
    if not callable(name):
        raise ValueError(f"@rpc({name!r}): give a stub function, a string, or nothing")
    # A bare `@rpc` receives the method itself, and a stub is a function of a module: their qualified names differ.
    owner = name.__qualname__.rpartition(".")[0] if hasattr(name, "__qualname__") else ""
    if owner and not owner.endswith("<locals>"):
        return mark(name, None, name.__name__)
    return lambda method: mark(method, name, name.__name__)


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


RESERVED_NAMES = frozenset({"call", "call_rank0", "call_batch", "world_size"})
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
