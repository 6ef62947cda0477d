"""Values that are exchanged between a program and its tests: plain ones copied, mutable ones shared, others by proxy.

A list, dict, set, bytearray, deque or array has a handle that both sides know. Each message has the contents of shared
values that have changed, so that each side sees the changes of the other. An object of any other type stays on its
side, and a `Foreign` represents it on the other side.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import pathlib
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

BUILTINS = {name: value for name, value in vars(builtins).items() if not name.startswith("_")}
"""Builtins before any program runs."""
PLAIN = frozenset((bool, int, float, str))
"""Types that JSON has in Python's encoding, including integers of any size, NaN and infinities."""
SCALARS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bool": (bool, lambda value: str(int(value)), lambda text: text == "1"),
    "int": (int, lambda value: str(int(value)), int),
    "float": (float, lambda value: repr(float(value)), float),
    "str": (str, str, str),
    "bytes": (bytes, lambda value: bytes(value).hex(), bytes.fromhex),
    "Decimal": (decimal.Decimal, str, decimal.Decimal),
    "Fraction": (fractions.Fraction, str, fractions.Fraction),
    "complex": (complex, lambda value: repr(complex(value)), complex),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "UUID": (uuid.UUID, str, uuid.UUID),
    "Path": (pathlib.PurePath, str, pathlib.Path),
}
FIXED: dict[str, type] = {"tuple": tuple, "frozenset": frozenset}
PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "range": (range, ("start", "stop", "step")),
    "slice": (slice, ("start", "stop", "step")),
    "timedelta": (datetime.timedelta, ("days", "seconds", "microseconds")),
}
SHARED: dict[str, type] = {
    "list": list,
    "dict": dict,
    "set": set,
    "bytearray": bytearray,
    "deque": collections.deque,
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
}
ARRAY_KINDS = "biufcSUmM"
"""Kinds of numpy dtypes whose bytes represent the full value."""
FOREIGN = "foreign"
UNARY = ("__neg__", "__pos__", "__abs__", "__invert__", "__index__")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
ORDER = ("__lt__", "__le__", "__gt__", "__ge__")
DESCRIPTIVE = ("__name__", "__qualname__", "__annotations__", "__wrapped__")
"""Names with two leading underscores that are read from the other side."""
UNREACHABLE = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.GeneratorType,
    types.CoroutineType,
    types.FrameType,
    types.TracebackType,
    types.CodeType,
    types.ModuleType,
    type,
)
"""Types of values of the tests' side of which a program gets no attribute, because they lead to the tests' code."""


class ProgramError(Exception):
    """Raised for an error of the other side whose type is not known here, and if the other side has ended."""


class Foreign:
    """Proxy of an object on the other side."""

    __slots__ = ("_troupe_link", "_troupe_module", "_troupe_number")

    def __init__(self, link: Any, number: int, module: types.ModuleType | None = None) -> None:
        for name, value in (("link", link), ("number", number), ("module", module)):
            object.__setattr__(self, f"_troupe_{name}", value)

    def _troupe_ask(self, operation: str, *operands: Any) -> Any:
        return self._troupe_link.ask(operation, self, *operands)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._troupe_ask("call", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # Python looks these up on its own, for example to copy or pickle a value. The other side is not asked.
        if name.startswith("__") and name not in DESCRIPTIVE:
            raise AttributeError(name)
        module = self._troupe_module
        return self._troupe_ask("attribute", name) if module is None else getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._troupe_ask("set", name, value)

    def __delattr__(self, name: str) -> None:
        self._troupe_ask("delete", name)

    @property
    def __dict__(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride] - read from the other side
        return self._troupe_ask("attribute", "__dict__")

    def __getitem__(self, key: Any) -> Any:
        return self._troupe_ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._troupe_ask("set_item", key, value)

    def __delitem__(self, key: Any) -> None:
        self._troupe_ask("delete_item", key)

    def __contains__(self, item: Any) -> bool:
        return self._troupe_ask("contains", item)

    def __len__(self) -> int:
        return self._troupe_ask("len")

    def __iter__(self) -> Any:
        return self._troupe_ask("iter")

    def __next__(self) -> Any:
        return self._troupe_ask("next")

    def __str__(self) -> str:
        return self._troupe_ask("str")

    def __repr__(self) -> str:
        return self._troupe_ask("repr")

    def __bool__(self) -> bool:
        return self._troupe_ask("bool")

    def __int__(self) -> int:
        return self._troupe_ask("int")

    def __float__(self) -> float:
        return self._troupe_ask("float")

    def __enter__(self) -> Any:
        return self._troupe_ask("enter")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> Any:
        return self._troupe_ask("exit", None if error is None else RuntimeError(str(error)))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Foreign) and self._troupe_ask("has_instance", instance)

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, Foreign) and self._troupe_ask("has_subclass", kind)

    def __eq__(self, other: object) -> bool:
        # On its own side the program may compare its values in any way.
        if self._troupe_link.is_program:
            return self is other
        raise TypeError("a value of a type of the program's own cannot be compared")

    def __ne__(self, other: object) -> bool:
        return not self == other

    # By identity, so that hashing never calls the program.
    __hash__ = object.__hash__


def _operate(name: str, is_reflected: bool = False) -> Callable[..., Any]:
    def method(self: Foreign, *others: Any) -> Any:
        if name in ORDER and not isinstance(others[0], Foreign) and not self._troupe_link.is_program:
            raise TypeError("a value of a type of the program's own cannot be compared")
        operands = (*others, self) if is_reflected else (self, *others)
        link = self._troupe_link
        value = link.ask("operate", name, *operands)
        has_plain_operand = not all(isinstance(other, Foreign) for other in others)
        if has_plain_operand and not isinstance(value, Foreign) and not link.is_program:
            # As in `abs(area() - 3) < 1e-6`, where the program would decide the comparison.
            raise TypeError("a value of a type of the program's own cannot be compared")
        return value

    return method


for _name in (*UNARY, *ORDER, *(f"__{name}__" for name in BINARY)):
    setattr(Foreign, _name, _operate(_name))
for _name in BINARY:
    setattr(Foreign, f"__r{_name}__", _operate(f"__{_name}__", is_reflected=True))


def foreign_generator(thing: Foreign) -> Iterator[Any]:
    """Yield the items of a generator of the other side."""
    sent = None
    while True:
        try:
            item = thing._troupe_ask("send", sent)
        except StopIteration as end:
            return end.value
        sent = yield item


async def foreign_coroutine(thing: Foreign) -> Any:
    """Run a coroutine of the other side to its end and return its result."""
    return thing._troupe_ask("run")
