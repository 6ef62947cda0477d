"""A program and its tests, in two sandboxes that are connected by a socket for each test.

    program DESCRIPTOR ...
    tests REPORT DESCRIPTOR ... < [[test, ...], seconds of each, seconds of all]

The program's side imports main.py and then serves the requests of the tests: read a name, call a function. The program
controls its process and can change anything in it. Only values leave the process, which the program could have computed
anyway, and tests never enter it. On the tests' side, the names of the program are proxies. Plain values are copied and
compared on the tests' side (code_values.py). A value of a class that the program has defined can be used, but it equals
nothing, because the program would decide about equality. Builtins and names of libraries are those of the tests' side
(code_names.py).
"""

from __future__ import annotations

import ast
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Iterable
from typing import Any, NoReturn

from plugins.sandbox.code_link import Link, own_trace
from plugins.sandbox.code_names import Names

MOST_TEXT = 4000
"""Maximum number of characters about a failed test. A program may raise errors that exceed the limit of the report."""
MODULE = "main"
"""Name under which the program is imported. Code under `if __name__ == "__main__"` does not run."""


# The program's side.


def run_program(channels: list[int]) -> None:
    """Import the program, then serve each test in a fork, so that every test starts from the state after the import."""
    module = sys.modules[MODULE] = sys.modules["__main__"] = types.ModuleType(MODULE)
    module.__file__ = "main.py"
    with open("main.py", encoding="utf-8", errors="replace") as file:
        source = file.read()
    # Local references, so that a program that redefines these functions cannot change them here.
    end, fork, wait, close, stdout, stderr = os._exit, os.fork, os.waitpid, os.close, sys.stdout, sys.stderr
    code = 0
    try:
        exec(compile(source, "main.py", "exec"), vars(module))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        channels = []
    except BaseException as error:  # noqa: BLE001 - the program may raise anything
        stderr.write("".join(own_trace(error).format()))
        code = 1
        channels = []
    stdout.flush()
    stderr.flush()
    for place, number in enumerate(channels):
        if child := fork():
            close(number)
            wait(child, 0)
            continue
        for later in channels[place + 1 :]:
            close(later)
        try:
            with socket.socket(fileno=number) as channel:
                link = Link(channel, is_program=True)
                link.names = vars(module)
                link.serve()
            stdout.flush()
        finally:
            end(0)
    # Exit at once: the program's exit handlers and threads could run for ever.
    end(code & 255)


# The tests' side.


def fault_of(error: BaseException) -> str:
    """Return the traceback of a failed test, with lines of the test and of the program only."""
    trace = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in trace.stack if frame.filename == "<test>"]
    lines = [f'  File "<test>", line {frame.lineno}, in {frame.name}\n' for frame in frames]
    theirs: str = vars(error).get("program_trace", "")
    last = list(trace.format_exception_only())[-1]
    return "".join(["Traceback (most recent call last):\n", *lines, theirs, last])


def fault_of_test(test: str, channel: socket.socket) -> str | None:
    """Run a test in this process. Return the text of its failure, or None."""
    link = Link(channel, is_program=False)
    try:
        parsed = ast.parse(test, "<test>")
        exec(compile(parsed, "<test>", "exec"), Names(link, parsed))
    except BaseException as error:  # noqa: BLE001 - a test may raise anything
        return fault_of(error)[-MOST_TEXT:]
    # Checked after a pass, because the test may have caught the error.
    return "the program has ended" if link.is_broken else None


def outcome_of(test: str, channel: socket.socket, seconds: float) -> list[Any] | None:
    """Run a test in a child process. Return None if it passed, otherwise its failure and True if it took too long.

    The child process is killed at the time limit. It cannot end itself reliably, because the test may catch every error
    or compare values of the program without end.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            outcome = fault_of_test(test, channel)
            os.write(writing, json.dumps([outcome]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    text = b""
    ends_at = time.monotonic() + seconds
    while select.select([reading], [], [], max(0.0, ends_at - time.monotonic()))[0]:
        part = os.read(reading, 2**16)
        if not part:
            break
        text += part
    os.kill(child, signal.SIGKILL)
    _, how = os.waitpid(child, 0)
    os.close(reading)
    if text.endswith(b"]"):
        fault = json.loads(text)[0]
        return None if fault is None else [fault, False]
    if time.monotonic() >= ends_at or how == signal.SIGXCPU:
        return ["", True]
    return ["the test was ended: it needs too much memory\n", False]


def run_tests(report: int, channels: list[int]) -> None:
    """Run the tests, and write a line of JSON for each: null if it passed, otherwise the failure and whether it was
    late.
    """
    with open(0, closefd=False, encoding="utf-8") as stdin:
        tests, seconds, seconds_of_all = json.load(stdin)
    ends_at = time.monotonic() + seconds_of_all
    for place, (test, number) in enumerate(zip(tests, channels, strict=True)):
        with socket.socket(fileno=number) as channel:
            # The first test also waits until the program is imported.
            limit = seconds * (1 + (place == 0))
            outcome = outcome_of(test, channel, min(limit, ends_at - time.monotonic()))
            channel.shutdown(socket.SHUT_RDWR)
        os.write(report, json.dumps(outcome).encode() + b"\n")
        if outcome is not None and outcome[1]:
            return


def main(arguments: Iterable[str]) -> NoReturn:
    """Run one of the two sides."""
    side, *numbers = arguments
    sys.argv[1:] = []
    sys.set_int_max_str_digits(0)  # integers of any size are passed as text
    descriptors = [int(number) for number in numbers]
    if side == "program":
        run_program(descriptors)
    else:
        run_tests(descriptors[0], descriptors[1:])
    os._exit(0)
