"""A program and its tests, in two sandboxes that a connection for each test joins.

    python -I -c <this> program DESCRIPTOR ...
    python -I -c <this> tests REPORT DESCRIPTOR ... < [[test, ...], seconds of each]

The program's side runs main.py and then does what a test asks for: read a name, call a function. The program shares its
process and may do with that what it likes: what leaves it are values, which it could have computed as well, and no test
comes there. The tests' side has the names of the program, which stand for what lies there. Plain values cross as they
are and are compared on the tests' side. A value of a type of the program's own can be used, and equals nothing, as that
would be the program's word. A builtin is the tests' own, and so is what they take from a module of Python's library.
"""

from __future__ import annotations

import builtins
import collections
import decimal
import fractions
import importlib
import json
import os
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

SCALARS = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "Decimal": decimal.Decimal,
    "Fraction": fractions.Fraction,
}
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
MOST_TEXT = 4000
"""Characters of what is told of a test that failed. What a program raises may say more than a report has room for."""
FOREIGN = "foreign"
"""What lies in the program, by its number there."""


def coded(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value as JSON has it, with its type; of any but the plain types what `other` makes of it."""
    if value is None:
        return None
    for name, kind in SCALARS.items():
        if isinstance(value, kind):
            return [name, repr(float(value)) if kind is float else str(int(value) if kind in (bool, int) else value)]
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return [name, [coded(item, other) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[coded(key, other), coded(item, other)] for key, item in value.items()]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    return other(value)


def decoded(given: Any, other: Callable[[str, Any], Any]) -> Any:
    """The value that was coded; of a type that is not plain what `other` makes of its name and what came with it."""
    if given is None:
        return None
    kind, held = given
    if kind == "bool":
        return held == "1"
    if kind in SCALARS:
        return SCALARS[kind](held)
    if kind in SEQUENCES:
        return SEQUENCES[kind]([decoded(item, other) for item in held])
    if kind == "dict":
        return {decoded(key, other): decoded(item, other) for key, item in held}
    if kind == "bytes":
        return bytes.fromhex(held)
    if kind == "complex":
        return complex(*held)
    return other(kind, held)


# The program's side.


class Program:
    """What lies in the program, for one test."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._kept: list[Any] = []

    def serve(self, channel: socket.socket) -> None:
        """Do what the test asks for, until it is over."""
        with channel.makefile("rwb") as stream:
            for line in stream:
                operation, *given = json.loads(line)
                try:
                    found = self._done(operation, *(decoded(item, self._foreign) for item in given))
                    reply = ["value", coded(found, self._keep)]
                except BaseException as error:  # noqa: BLE001 - the program may raise anything
                    reply = ["raised", type(error).__name__, str(error), "".join(own_trace(error).stack.format())]
                stream.write(json.dumps(reply).encode() + b"\n")
                stream.flush()

    def _keep(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, collections.deque):
            return ["deque", [coded(item, self._keep) for item in value]]
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return ["array" if hasattr(value, "__len__") else "number", coded(value.tolist(), self._keep)]
        self._kept.append(value)
        return [FOREIGN, len(self._kept) - 1]

    def _foreign(self, kind: str, held: Any) -> Any:
        return self._kept[held] if kind == FOREIGN else sys.modules[held]

    def _done(self, operation: str, target: Any = None, *rest: Any) -> Any:
        if operation == "names":
            return [name for name in self._names if not name.startswith("__")]
        if operation == "name":
            return self._names[target]
        if operation == "call":
            return target(*rest[0], **rest[1])
        plain: dict[str, Callable[..., Any]] = {"attribute": getattr, "set": setattr, "next": next, "iter": iter}
        plain |= {"item": lambda thing, key: thing[key], "len": len, "str": str, "repr": repr, "bool": bool}
        return plain[operation](target, *rest)


def own_trace(error: BaseException) -> traceback.TracebackException:
    """How the program came to an error, without our lines."""
    trace = traceback.TracebackException.from_exception(error)
    trace.stack[:] = [frame for frame in trace.stack if frame.filename == "main.py"]
    return trace


def run_program(channels: list[int]) -> None:
    """Run the program, then serve the tests, each in a fork that finds the program as its last line has left it."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = "main.py"
    with open("main.py", encoding="utf-8", errors="replace") as file:
        source = file.read()
    # What the program redefines does not change what is used here.
    end, fork, wait, close, stdout, stderr = os._exit, os.fork, os.waitpid, os.close, sys.stdout, sys.stderr
    try:
        exec(compile(source, "main.py", "exec"), vars(module))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the program may raise anything
        stderr.write("".join(own_trace(error).format()))
        stdout.flush()
        stderr.flush()
        end(1)
    stdout.flush()
    for place, number in enumerate(channels):
        if child := fork():
            close(number)
            wait(child, 0)
            continue
        for later in channels[place + 1 :]:
            close(later)
        try:
            with socket.socket(fileno=number) as channel:
                Program(vars(module)).serve(channel)
            stdout.flush()
        finally:
            end(0)


# The tests' side.


class ProgramError(Exception):
    """What the program has raised, of a type of its own."""


class Overdue(BaseException):
    """A test has used its time."""


class Link:
    """The connection to the process that serves one test."""

    def __init__(self, number: int) -> None:
        self.channel = socket.socket(fileno=number)
        self._stream = self.channel.makefile("rwb")

    def ask(self, operation: str, *given: Any) -> Any:
        """Have something done there."""
        request = [operation, *(coded(item, self._coded) for item in given)]
        try:
            self._stream.write(json.dumps(request).encode() + b"\n")
            self._stream.flush()
            line = self._stream.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise ProgramError("the program has ended")
        kind, *found = json.loads(line)
        if kind == "value":
            return decoded(found[0], self._decoded)
        name, text, trace = map(str, found)
        error = self._error(name, text)
        vars(error)["program_trace"] = trace
        raise error

    def _error(self, name: str, text: str) -> Exception:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:  # some are made of more
                return ProgramError(f"{name}: {text}")
        return ProgramError(f"{name}: {text}")

    def _coded(self, value: Any) -> Any:
        if isinstance(value, Foreign):
            return [FOREIGN, vars(value)["number"]]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        raise TypeError(f"a {type(value).__name__} cannot be given to the program")

    def _decoded(self, kind: str, held: Any) -> Any:
        if kind == "module":
            return importlib.import_module(str(held))
        if kind == "deque":
            return collections.deque(decoded(item, self._decoded) for item in held)
        if kind in ("array", "number"):
            return importlib.import_module("numpy").array(decoded(held, self._decoded))[()]
        if kind == FOREIGN:
            return Foreign(self, int(held))
        raise ProgramError("the program has sent what is no value")


class Foreign:
    """Something that lies in the program."""

    def __init__(self, link: Link, number: int, module: types.ModuleType | None = None) -> None:
        vars(self).update(link=link, number=number, module=module)

    def _ask(self, operation: str, *given: Any) -> Any:
        return vars(self)["link"].ask(operation, self, *given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = vars(self)["module"]
        return self._ask("attribute", name) if module is None else getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __len__(self) -> int:
        return self._ask("len")

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __str__(self) -> str:
        return self._ask("str")

    def __repr__(self) -> str:
        return self._ask("repr")

    def __bool__(self) -> bool:
        return self._ask("bool")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("a value of a type of the program's own cannot be compared")

    def __ne__(self, other: object) -> NoReturn:
        self.__eq__(other)

    __hash__ = object.__hash__


class Names(dict[str, Any]):
    """What a test finds beside the builtins: the program's names, each asked for when it is used."""

    def __init__(self, link: Link) -> None:
        super().__init__(__name__="__test__", __builtins__=builtins)
        self._link = link
        self._there = frozenset(link.ask("names"))

    def __contains__(self, name: object) -> bool:
        return name in self._there or super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name not in self._there or hasattr(builtins, name):
            raise KeyError(name)
        value = self._link.ask("name", name)
        if name in sys.stdlib_module_names:
            # A function of this name can be called. What is taken from the module comes from the library.
            module = importlib.import_module(name)
            value = Foreign(self._link, vars(value)["number"], module) if isinstance(value, Foreign) else module
        self[name] = value
        return value


def fault_of(error: BaseException) -> str:
    """The traceback of a test that failed, with the program's lines and without ours."""
    trace = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in trace.stack if frame.filename == "<test>"]
    lines = [f'  File "<test>", line {frame.lineno}, in {frame.name}\n' for frame in frames]
    theirs: str = vars(error).get("program_trace", "")
    last = list(trace.format_exception_only())[-1]
    return "".join(["Traceback (most recent call last):\n", *lines, theirs, last])


def raise_overdue(*_: object) -> NoReturn:
    """End the test that runs."""
    raise Overdue


def run_tests(report: int, channels: list[int]) -> None:
    """Run the tests, and write a line of JSON for each: null where it passed, else its fault and if it was late."""
    with open(0, closefd=False, encoding="utf-8") as given:
        tests, seconds = json.load(given)
    signal.signal(signal.SIGALRM, raise_overdue)
    for test, number in zip(tests, channels, strict=True):
        link, outcome = Link(number), None
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            exec(compile(test, "<test>", "exec"), Names(link))
        except Overdue:
            outcome = ["", True]
        except BaseException as error:  # noqa: BLE001 - a test may raise anything
            outcome = [fault_of(error)[-MOST_TEXT:], False]
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(report, json.dumps(outcome).encode() + b"\n")
        if outcome is not None and outcome[1]:
            return
        link.channel.shutdown(socket.SHUT_RDWR)


def main(arguments: Iterable[str]) -> None:
    """Be one of the two."""
    side, *numbers = arguments
    sys.argv[1:] = []
    sys.set_int_max_str_digits(0)  # numbers cross as text
    descriptors = [int(number) for number in numbers]
    if side == "program":
        run_program(descriptors)
    else:
        run_tests(descriptors[0], descriptors[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
