"""Connection between a program and one of its tests: lines of JSON, in turns.

Each message has a request or a reply, and the contents of shared values that have changed (code_values.py).
"""

from __future__ import annotations

import base64
import collections
import importlib
import json
import operator
import socket
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from plugins.sandbox.code_values import (
    ARRAY_KINDS,
    BINARY,
    BUILTINS,
    FIXED,
    FOREIGN,
    ORDER,
    PARTS,
    PLAIN,
    SCALARS,
    SHARED,
    UNARY,
    UNREACHABLE,
    Foreign,
    ProgramError,
    foreign_coroutine,
    foreign_generator,
)

MOST_BYTES = 2**26
"""Maximum size of a message in bytes."""
PACKAGES = ("networkx", "numpy", "pandas", "pytest", "scipy", "sortedcontainers", "sympy")
"""Packages besides the standard library from which tests may use names that a program has imported."""
NO_LIBRARY = ("__main__", "antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtledemo")
"""Modules of the standard library whose import has side effects."""


OPERATORS = {name: name for name in (*UNARY, *ORDER, *(f"__{name}__" for name in BINARY))}


def run_coroutine(thing: Any) -> Any:
    """Run a coroutine of the program to its end."""
    # Imported here, because it takes long and few programs need it.
    import asyncio

    async def run() -> Any:
        return await thing

    return asyncio.run(run())


OPERATIONS: dict[str, Callable[..., Any]] = {
    "attribute": getattr,
    "set": setattr,
    "delete": delattr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "delete_item": operator.delitem,
    "contains": operator.contains,
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "operate": lambda name, *operands: getattr(operator, OPERATORS[name])(*operands),
    "enter": lambda thing: type(thing).__enter__(thing),
    "exit": lambda thing, error: type(thing).__exit__(thing, error and type(error), error, None),
    "has_instance": lambda kind, thing: isinstance(thing, kind),
    "has_subclass": lambda kind, other: issubclass(other, kind),
    "send": lambda thing, value: thing.send(value),
    "run": run_coroutine,
    "next": next,
    "iter": iter,
    "len": len,
    "str": str,
    "repr": repr,
    "bool": bool,
    "int": int,
    "float": float,
}
FORMS = {"generator": types.GeneratorType, "coroutine": types.CoroutineType}


class Link:
    """Connection to the other side, with the values that both sides know."""

    def __init__(self, channel: socket.socket, *, is_program: bool) -> None:
        self.channel = channel
        self.is_program = is_program
        self.is_broken = False
        """True if the other side has ended or has sent an invalid message."""
        self.names: dict[str, Any] = {}
        """Global names of the program, on its side."""
        self._stream = channel.makefile("rwb")
        self._numbers = iter(range(int(is_program), sys.maxsize, 2))
        self._kept: dict[int, Any] = {}
        self._kept_numbers: dict[int, int] = {}
        self._proxies: dict[int, Any] = {}
        self._kinds: dict[Any, type] = {}
        self._shared: dict[int, Any] = {-1: []}
        self._handles: dict[int, int] = {}
        self._known: dict[int, str] = {}
        self._unused_count = self._count(-1)
        del self._shared[-1]

    # Messages.

    def ask(self, operation: str, *operands: Any) -> Any:
        """Have the other side perform an operation. Requests of the other side are served until its reply arrives."""
        self._send("do", [operation, *operands])
        while True:
            kind, content = self._receive()
            if kind == "value":
                return content
            if kind == "raised":
                error = self._error(*content)
                if isinstance(error, StopIteration | StopAsyncIteration) and operation not in ("next", "send"):
                    # A StopIteration would end a loop of the test, such as `all(map(check, cases))`, before its first
                    # case.
                    raise ProgramError(f"the program has raised {type(error).__name__}")
                raise error
            self._serve(*content)

    def serve(self) -> None:
        """Perform operations for the other side until it ends the connection."""
        while True:
            try:
                _, request = self._receive()
            except ProgramError:
                return
            self._serve(*request)
            # The reference would keep the values of the request alive until the next one arrives.
            del request

    def _serve(self, operation: str, *operands: Any) -> None:
        caught = BaseException if self.is_program else Exception
        try:
            self._send("value", self._done(operation, *operands))
        except caught as error:
            if self.is_broken:
                raise
            self._send("raised", error)

    def _done(self, operation: str, *operands: Any) -> Any:
        if self.is_program and operation == "names":
            return [name for name in self.names if not name.startswith("__")]
        if self.is_program and operation == "name":
            return self.names[operands[0]]
        if self.is_program and operation == "source":
            return source_of(operands[0], operands[1], self.names)
        if not self.is_program and operation in ("attribute", "set", "delete"):
            # A program must not reach the internals of the tests through a value that it was passed.
            is_own = type(operands[0]).__module__ == "__test__"
            is_hidden = str(operands[1]).startswith("_") or isinstance(operands[0], UNREACHABLE)
            if is_hidden or (operation != "attribute" and not is_own):
                raise AttributeError(operands[1])
        return OPERATIONS[operation](*operands)

    def _send(self, kind: str, content: Any) -> None:
        if kind == "raised":
            coded = self._raised(content)
        elif kind == "do":
            coded = [self.coded(each) for each in content]
        else:
            coded = self.coded(content)
        changed = self._changed()
        # Dropped last, because a value without references on this side may have changed before.
        dropped = self._drop()
        line = f"[{json.dumps(kind)}, {json.dumps(coded)}, [{', '.join(changed)}], {json.dumps(dropped)}]\n"
        try:
            self._stream.write(line.encode())
            self._stream.flush()
        except OSError:
            self._break()

    def _receive(self) -> tuple[str, Any]:
        try:
            line = self._stream.readline(MOST_BYTES)
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            self._break()
        try:
            kind, coded, changed, dropped = json.loads(line)
            del line
            if kind == "do" and not self.is_program and not any(_is_own(each) for each in coded[1:3]):
                # A program may use the values that it was passed, and nothing else on the tests' side.
                raise ValueError(coded)
            for handle, contents in changed:
                if handle not in self._shared:
                    self._share(_new(*contents), handle)
            for handle, contents in changed:
                self._known[handle] = json.dumps(contents)
                self._fill(self._shared[handle], *contents)
            content = [self.decoded(each) for each in coded] if kind in ("do", "raised") else self.decoded(coded)
            for handle in dropped:
                self._forget(handle)
        except Exception:  # noqa: BLE001 - any error means that the message is invalid
            self._break()
        return kind, content

    def _break(self) -> NoReturn:
        self.is_broken = True
        raise ProgramError("the program has ended")

    # Values.

    def coded(self, value: Any) -> Any:
        """Encode a value for JSON, with its type if JSON does not have it."""
        kind = type(value)
        if value is None or kind in PLAIN:
            return value
        if id(value) in self._handles:
            return ["shared", self._handles[id(value)]]
        if any(kind is each for each in SHARED.values()) or (_is_array(value) and value.shape):
            return ["shared", self._share(value, next(self._numbers))]
        if _is_array(value):
            return ["array", _array_contents(value)]
        for name, (scalar, write, _) in SCALARS.items():
            if isinstance(value, scalar):
                return [name, write(value)]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ["named", kind.__name__, list(kind._fields), [self.coded(item) for item in value]]
        for name, each in {**FIXED, **SHARED}.items():
            if isinstance(value, each):
                return [name, self._items(value)]
        for name, (whole, parts) in PARTS.items():
            if isinstance(value, whole):
                return [name, [self.coded(getattr(value, part)) for part in parts]]
        return self._other(value)

    def _items(self, value: Any) -> list[Any]:
        return [self.coded(item) for item in (value.items() if isinstance(value, dict) else value)]

    def _other(self, value: Any) -> Any:
        if isinstance(value, Foreign):
            return ["own", value._troupe_number]
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and BUILTINS.get(name) is value and (isinstance(value, type) or not self.is_program):
            return ["builtin", name]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["error", self._error_kind(value)]
        form = next((form for form, each in FORMS.items() if isinstance(value, each)), "")
        return [FOREIGN, self._keep(value), type(value).__name__, form]

    def _keep(self, value: Any) -> int:
        if id(value) not in self._kept_numbers:
            number = self._kept_numbers[id(value)] = next(self._numbers)
            self._kept[number] = value
        return self._kept_numbers[id(value)]

    def decoded(self, coded: Any) -> Any:
        """Decode a value that `coded` has encoded."""
        if not isinstance(coded, list):
            return coded
        kind, *held = coded
        if kind == "shared":
            return self._shared[held[0]]
        if kind in SCALARS:
            return SCALARS[kind][2](held[0])
        if kind in FIXED or kind in SHARED:
            items = [self.decoded(item) for item in held[0]]
            return {**FIXED, **SHARED}[kind](*{"defaultdict": [None]}.get(kind, []), items)
        if kind in PARTS:
            return PARTS[kind][0](*(self.decoded(part) for part in held[0]))
        if kind == "named":
            key = (held[0], *held[1])
            if key not in self._kinds:
                self._kinds[key] = collections.namedtuple(held[0], held[1])
            return self._kinds[key](*(self.decoded(item) for item in held[2]))
        if kind == "builtin":
            return BUILTINS[held[0]] if self.is_program else _type(BUILTINS[held[0]], object)
        if kind == "array":
            return _array(*held[0])[()]
        if kind == "module":
            return library(held[0])
        if kind == "error":
            return self._error_type(*held[0])
        return self._kept[held[0]] if kind == "own" else self._foreign(*held)

    def _foreign(self, number: int, name: str, form: str) -> Any:
        if number in self._proxies:
            return self._proxies[number]
        if name not in self._kinds:
            self._kinds[name] = type(name, (Foreign,), {"__slots__": ()})
        thing = self._kinds[name](self, number)
        if form:
            thing = {"generator": foreign_generator, "coroutine": foreign_coroutine}[form](thing)
        if self.is_program:
            # Proxies keep identity on the program's side. On the tests' side the program could claim any identity.
            self._proxies[number] = thing
        return thing

    # Errors.

    def _raised(self, error: BaseException) -> list[Any]:
        trace = "".join(own_trace(error).stack.format()) if self.is_program else ""
        try:
            details = [self.coded(tuple(error.args)), self.coded(dict(vars(error)))]
        except Exception:  # noqa: BLE001 - the arguments may have any type
            details = [["tuple", [str(error)]], None]
        return [["error", self._error_kind(type(error))], str(error), trace, *details]

    def _error(self, kind: type, text: str, trace: str, args: Any, attributes: Any) -> BaseException:
        error: BaseException = ProgramError(f"{kind.__name__}: {text}")
        try:
            error = kind(*args)
            vars(error).update(attributes or {}, program_text=text)
        except Exception:  # noqa: BLE001 - a constructor may require any arguments and raise anything
            vars(error)["program_text"] = text
        vars(error)["program_trace"] = trace
        return error

    def _error_kind(self, kind: type) -> list[Any]:
        name, module = kind.__name__, str(kind.__module__)
        if BUILTINS.get(name) is kind:
            return ["", name]
        if module != "main" and getattr(sys.modules.get(module), name, None) is kind:
            return [module, name]
        bases = [self._error_kind(base) for base in kind.__bases__ if issubclass(base, BaseException)]
        return [self._keep(kind), name, bases]

    def _error_type(self, where: Any, name: str, bases: Any = ()) -> type:
        if isinstance(where, int):
            if where not in self._kinds:
                above = tuple(self._error_type(*base) for base in bases)
                self._kinds[where] = type(name, above, {"__str__": lambda self: vars(self).get("program_text", "")})
            return self._kinds[where]
        return _type(vars(library(where))[name] if where else BUILTINS[name], BaseException)

    # Shared values.

    def _share(self, value: Any, handle: int) -> int:
        self._shared[handle] = value
        self._handles[id(value)] = handle
        return handle

    def _forget(self, handle: int) -> None:
        value = self._shared.pop(handle, None)
        self._handles.pop(id(value), None)
        self._known.pop(handle, None)

    def _count(self, handle: int) -> int:
        return sys.getrefcount(self._shared[handle])

    def _drop(self) -> list[int]:
        """Forget values without references on this side: they cannot be changed here, nor can changes be seen here."""
        dropped: list[int] = []
        while unused := [handle for handle in self._shared if self._count(handle) <= self._unused_count]:
            for handle in unused:
                self._forget(handle)
            dropped += unused
        return dropped

    def _changed(self) -> list[str]:
        """Return the contents that the other side does not have yet, as JSON."""
        changed: list[str] = []
        waiting = collections.deque(self._shared)
        while waiting:
            handle = waiting.popleft()
            last = next(reversed(self._shared))
            text = json.dumps(self._contents(self._shared[handle]))
            if self._known.get(handle) != text:
                self._known[handle] = text
                changed.append(f"[{handle}, {text}]")
            # Contents may hold values that were not shared before. These are appended to `_shared`.
            for new in reversed(self._shared):
                if new == last:
                    break
                waiting.append(new)
        return changed

    def _contents(self, value: Any) -> list[Any]:
        if _is_array(value):
            return ["array", *_array_contents(value)]
        kind = next(name for name, each in SHARED.items() if type(value) is each)
        if kind == "bytearray":
            return [kind, value.hex()]
        extra = {"deque": "maxlen", "defaultdict": "default_factory"}.get(kind)
        return [kind, self._items(value), self.coded(getattr(value, extra)) if extra else None]

    def _fill(self, value: Any, kind: str, items: Any, extra: Any = None, *_: Any) -> None:
        if kind == "array":
            value[...] = _array(items, extra, *_)
        elif kind == "bytearray":
            value[:] = bytes.fromhex(items)
        else:
            held = [self.decoded(item) for item in items]
            if isinstance(value, collections.defaultdict):
                value.default_factory = self.decoded(extra)
            value.clear()
            if isinstance(value, dict):
                for key, item in held:
                    value[key] = item
            elif isinstance(value, set):
                value.update(held)
            else:
                value.extend(held)


def _is_own(coded: Any) -> bool:
    return isinstance(coded, list) and coded[0] == "own"


def _type(value: Any, above: type) -> Any:
    if not (isinstance(value, type) and issubclass(value, above)):
        raise TypeError(f"{value!r:.80} is no type of {above.__name__}")
    return value


def _new(kind: str, *contents: Any) -> Any:
    if kind == "array":
        return _array(*contents)
    return collections.deque(maxlen=contents[1]) if kind == "deque" else SHARED[kind]()


def _is_array(value: Any) -> bool:
    """Return True for an array or a scalar of numpy's own types."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or type(value).__module__ == "numpy"):
        return False
    return isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in ARRAY_KINDS


def _array_contents(value: Any) -> list[Any]:
    return [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]


def _array(kind: str, shape: list[int], content: str) -> Any:
    numpy = importlib.import_module("numpy")
    dtype = numpy.dtype(kind)
    if dtype.kind not in ARRAY_KINDS:
        raise TypeError(kind)
    return numpy.frombuffer(bytearray(base64.b64decode(content)), dtype).reshape(shape)


def library(name: str) -> types.ModuleType:
    """Return a module of the standard library, or of a package that tests use.

    Raises:
        ImportError: it is neither.
    """
    root = name.partition(".")[0]
    parts = name.split(".")
    if (root not in sys.stdlib_module_names and root not in PACKAGES) or any(part in NO_LIBRARY for part in parts):
        raise ImportError(f"{name} is no module that tests may take from a program")
    return importlib.import_module(name)


def source_of(name: str, modules: list[str], names: dict[str, Any]) -> str:
    """Return the module from which a program has one of its names, or "" if the program has defined it."""
    value = names[name]
    if isinstance(value, types.ModuleType):
        return value.__name__
    return next((each for each in modules if getattr(sys.modules.get(each), name, names) is value), "")


def own_trace(error: BaseException) -> traceback.TracebackException:
    """Return the traceback of an error in the program, without the frames of the sandbox."""
    trace = traceback.TracebackException.from_exception(error)
    trace.stack[:] = [frame for frame in trace.stack if frame.filename == "main.py"]
    return trace
