"""Decorators that export methods of a workload: `@trainer_invocation`, `@register` and `@rpc`.

The decorators attach a description and leave the function unchanged. A type checker sees two forms of a decorated
method: `self.update(batch)` inside the workload has the method's return type, and `self.RG_ACTOR.update(batch)` in a
trainer has the return type of the group call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from core.exports import BoundStub, CallSpec, Dispatch, Export, F, Mode, NdDispatch, Replay, marks
from core.migration import alias_of

if TYPE_CHECKING:
    from core.futures import Future

G = TypeVar("G")
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
M_co = TypeVar("M_co", covariant=True)
G_co = TypeVar("G_co", covariant=True)


class Exported(Protocol[M_co, G_co]):
    """Type of a decorated method: `M_co` when read from an instance, `G_co` when read from the class, as a group is."""

    @overload
    def __get__(self, instance: None, owner: Any) -> G_co: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> M_co: ...


class Repeats(TypedDict, total=False):
    """Options that allow a call to be sent again."""

    idempotent: bool
    replay: Replay | None


class _Options(Repeats, total=False):
    is_async: bool
    timeout: float
    end_on_timeout: bool
    auto_shard: bool


class _ToAll(_Options, total=False):
    target: Literal["ALL"]


class _ToAny(_Options, total=False):
    target: Literal["ALL", "RANK0"]


if TYPE_CHECKING:
    # P, R: parameters and return type of a method. Q: parameters of the group call. G: its return type.
    Method = Callable[Concatenate[Any, P], R]
    Mark = Callable[[Method[P, R]], Exported[Callable[P, R], Callable[P, G]]]
    Prepared = Callable[[Method[P, R]], Exported[Callable[P, R], Callable[Q, Any]]]
    Post = Callable[[Any], G]
    TRUE = Literal[True]
    FALSE = Literal[False]
    RANK0 = Literal["RANK0"]


@overload
def trainer_invocation(function: Method[P, R], /) -> Exported[Callable[P, R], Callable[P, list[R]]]: ...
@overload
def trainer_invocation(*, blocking: TRUE = ..., **options: Unpack[_ToAll]) -> Mark[P, R, list[R]]: ...
@overload
def trainer_invocation(*, blocking: FALSE, **options: Unpack[_ToAll]) -> Mark[P, R, Future[list[R]]]: ...
@overload
def trainer_invocation(*, target: RANK0, blocking: TRUE = ..., **options: Unpack[_Options]) -> Mark[P, R, R]: ...
@overload
def trainer_invocation(*, target: RANK0, blocking: FALSE, **options: Unpack[_Options]) -> Mark[P, R, Future[R]]: ...
@overload
def trainer_invocation(*, post_func: Post[G], blocking: TRUE = ..., **options: Unpack[_ToAny]) -> Mark[P, R, G]: ...
@overload
def trainer_invocation(*, post_func: Post[G], blocking: FALSE, **options: Unpack[_ToAny]) -> Mark[P, R, Future[G]]: ...
@overload
def trainer_invocation(*, pre_func: Callable[Q, Any], **options: Any) -> Prepared[P, R, Q]: ...
@overload
def trainer_invocation(*, pre_function: Callable[Q, Any], **options: Any) -> Prepared[P, R, Q]: ...
@overload
def trainer_invocation(*, post_function: Post[G], blocking: TRUE = ..., **options: Unpack[_ToAny]) -> Mark[P, R, G]: ...
def trainer_invocation(
    function: Any = None,
    /,
    *,
    target: Literal["ALL", "RANK0"] = "ALL",
    auto_shard: bool = True,
    idempotent: bool = False,
    replay: Replay | None = None,
    **options: Any,
) -> Any:
    """Make a method callable through the trainer's role groups, such as `self.RG_ACTOR.update(batch)`.

    Args:
        blocking: wait for the results. False returns a Future immediately.
        is_async: wait for all workers with a `timeout`. On expiry TimeoutError names the missing ranks.
        timeout: timeout in seconds, used only with is_async. A late worker keeps running and serves later calls.
        end_on_timeout: treat workers that exceed the timeout as hung: they are killed and replaced.
        target: "ALL" calls all workers. "RANK0" calls only the first and returns its value instead of a list.
        auto_shard: split lists, arrays and batches over the workers. Other arguments are sent whole to all.
        pre_func: function applied to the arguments in the caller's process. Its return value is sent instead. A tuple
            gives several arguments.
        post_func: function applied to the list of results in the caller's process. Its return value is the result.
        idempotent: allow the call to be sent again to the replacement if an instance of a `run` role dies during it.
        replay: "last" repeats the last successful call in a replacement before it receives any other call.

    Raises:
        ValueError: an option has an invalid value. Raised when the class is defined.
    """
    options = {alias_of("trainer_invocation", k, "trainer_invocation", ValueError) or k: v for k, v in options.items()}
    known = CallSpec.__dataclass_fields__.keys() - {"mode"}
    if unknown := sorted(options.keys() - known):
        known |= {"target", "auto_shard", "idempotent", "replay"}
        raise ValueError(f"trainer_invocation has no options {unknown}; valid options are {sorted(known)}")
    if target not in ("ALL", "RANK0"):
        raise ValueError(f"target={target!r} is invalid; set target='ALL' (every worker) or 'RANK0' (the first)")
    modes = {("ALL", True): Dispatch.AUTO, ("ALL", False): Dispatch.ONE_TO_ALL}
    spec = CallSpec(modes.get((target, bool(auto_shard)), Dispatch.RANK_ZERO), **options)
    mark = marks(Export("", spec, idempotent=idempotent, replay=replay))
    return mark if function is None else mark(function)


_OneAnswer = Literal[Dispatch.RANK_ZERO, Dispatch.DP_COMPUTE_PROTO] | NdDispatch
"""Dispatch modes whose call returns one value: the only result, or all results joined."""
_AsList = Literal[Dispatch.AUTO, Dispatch.ONE_TO_ALL]


@overload
def register(dispatch_mode: _OneAnswer, blocking: TRUE = ..., **options: Unpack[Repeats]) -> Mark[P, R, R]: ...
@overload
def register(dispatch_mode: _OneAnswer, blocking: FALSE, **options: Unpack[Repeats]) -> Mark[P, R, Future[R]]: ...
@overload
def register(dispatch_mode: _AsList, blocking: TRUE = ..., **options: Unpack[Repeats]) -> Mark[P, R, list[R]]: ...
@overload
def register(dispatch_mode: _AsList, blocking: FALSE, **options: Unpack[Repeats]) -> Mark[P, R, Future[list[R]]]: ...
@overload
def register(dispatch_mode: Mode = ..., blocking: bool = ..., **options: Unpack[Repeats]) -> Prepared[P, R, ...]: ...
def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    blocking: bool = True,
    *,
    idempotent: bool = False,
    replay: Replay | None = None,
    **options: Any,
) -> Any:
    """Make a method callable through worker groups, such as `self.actor_rollout.generate_sequences(batch)`.

    Args:
        dispatch_mode: a `Dispatch`, or `nd_compute(mesh)`.
        blocking: wait for the result. False returns a Future immediately.
        idempotent: see `trainer_invocation`.
        replay: see `trainer_invocation`.

    Raises:
        ValueError: an option has an invalid value. Raised when the class is defined.
    """
    for name in options:
        alias_of("register", name, "register", ValueError)
        raise ValueError(f"register has no option {name!r}; valid options: dispatch_mode, blocking, idempotent, replay")
    return marks(Export("", CallSpec(dispatch_mode, blocking), idempotent=idempotent, replay=replay))


def rpc(
    name: str | Callable[..., Any] | None = None,
    /,
    *,
    export: bool = False,
    idempotent: bool = False,
    replay: Replay | None = None,
) -> Callable[[F], F]:
    """Bind a method to a remote-call stub, such as `@rpc(remote_call.actor_forward)`.

    A function at the top level of a role's module can be exported in the same way.

    Args:
        name: the stub, or a string. The method is callable under the stub's name or the string. Default (`@rpc`): its
            own name.
        export: make a function outside of any class callable in every workload of its process.
        idempotent: see `trainer_invocation`.
        replay: see `trainer_invocation`.

    Raises:
        ValueError: `name` is neither a stub nor a string.
    """

    def bound(label: str, stub: Callable[..., Any] | None) -> Any:
        return marks(Export(label, None, stub, idempotent, replay), everywhere=export)

    if name is None or isinstance(name, str):
        return bound(name or "", None)
    if not callable(name):
        raise ValueError(f"@rpc({name!r}): pass a stub function, a string, or no argument")
    # A bare `@rpc` receives the method itself. Its qualified name has a class in it, the name of a stub does not.
    owner = getattr(name, "__qualname__", "").rpartition(".")[0]
    if owner and not owner.endswith("<locals>"):
        return bound("", None)(name)
    return BoundStub(name, bound(name.__name__, name), Export(name.__name__))
