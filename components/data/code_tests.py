"""Programs that a policy wrote, tried on the tests that a data set brings, in the sandbox.

What a program should print is compared here. Assertions about what its functions return run in a sandbox of their own,
beside that of the program (code_test_child.py), and count by their word alone: how the program ends, what it prints and
what it does to its interpreter prove nothing; a value that it returns is compared where the program cannot reach.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.data.sandbox import Limits, SandboxResult, in_place, run_now, run_python

MOST_TESTS = 10
"""So many of a response's tests are run, the first ones."""
LIMITS = Limits(timeout_s=5.0, cpu_s=5, max_output=2**20)
"""Of each. All of a response's tests are done within the minute that reward code has for it."""

START_S = 10.0
"""Seconds that the start of both sandboxes may take."""

_CHILD = Path(__file__).with_name("code_test_child.py").read_text(encoding="utf-8")
_BLOCK = re.compile(r"```[ \t]*+(\w*+)[^\n`]*+\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "py", "python", "python3")
_CALL = """\
import json
_function = Solution().{name} if "Solution" in globals() else {name}
_result = json.loads(json.dumps(_function(*json.loads({arguments!r}))))
# Some data sets put results into lists.
assert json.loads({expected!r}) in (_result, [_result])
"""


def code_score(
    data_source: str,  # noqa: ARG001 - part of the signature
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001 - as above
) -> dict[str, float]:
    """The share of its tests that a response's program passes, and as `acc` whether it passes all.

    Args:
        data_source: not looked at.
        solution_str: the program is the last block of Python in it, or all of it where it has no such block.
        ground_truth: an object, or JSON of one: `inputs` and `outputs`, lists of what a program reads and writes, or
            with `fn_name` of the arguments and the result of its function; or `assert_case`, a list of assertions.
        extra_info: not looked at.

    Raises:
        ValueError: the ground truth is none of these.
    """
    truth = _checked(ground_truth)
    assertions = [*(truth.get("assert_case") or ()), *_calls(truth)][:MOST_TESTS]
    dialogues = list(_dialogues(truth))[: MOST_TESTS - len(assertions)]
    count = len(assertions) + len(dialogues)
    if not count:
        raise ValueError(f"the ground truth {ground_truth!r:.80} has no tests")
    program, passed = program_in(solution_str), 0
    if assertions and program.strip():
        passed += sum(run_assertions(program, assertions, LIMITS).passed)
    for given, expected in dialogues if program.strip() else ():
        result = run_python(program, given, LIMITS)
        passed += result.exit == 0 and same_lines(result.stdout, expected)
        if result.reason:  # what has met a limit once does so again
            break
    return {"score": passed / count, "acc": float(passed == count)}


def program_in(text: str) -> str:
    """The last block of Python between ```, or all of the text where there is none."""
    blocks = [code for language, code in _BLOCK.findall(text) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else text


def same_lines(found: str, expected: str | Iterable[object]) -> bool:
    """Whether a program printed these lines, but for white space at their ends and blank ones at the end."""
    return _lines(found) == _lines(expected)


@dataclass(frozen=True)
class AssertionResult:
    """What became of assertions about a program."""

    passed: tuple[bool, ...]
    """Of each. After one that took too long none is tried."""
    text: str
    """What somebody reads who has written the program: what it printed, and how its first test failed."""


def run_assertions(program: str, tests: Sequence[str], limits: Limits | None = None) -> AssertionResult:
    """`run_assertions_async` for code without an event loop, such as a reward function's."""
    return asyncio.run(run_assertions_async(program, tests, limits))


async def run_assertions_async(program: str, tests: Sequence[str], limits: Limits | None = None) -> AssertionResult:
    """Run a program, then each test on the program as its last line has left it.

    Args:
        program: Python.
        tests: Python, such as `assert add(1, 2) == 3`, with the program's names.
        limits: of each test, and of the program before them.
    """
    return await in_place(_run_assertions(program, tests, limits or Limits()))


async def _run_assertions(program: str, tests: Sequence[str], limits: Limits) -> AssertionResult:
    count = len(tests)
    program_limits = replace(limits, timeout_s=limits.timeout_s * (count + 1) + START_S)
    test_limits = replace(program_limits, cpu_s=limits.cpu_s * (count + 1))
    with ExitStack() as stack:
        report = stack.enter_context(tempfile.TemporaryFile())
        pairs = [socket.socketpair() for _ in tests]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
        side = _side("program", program, "", program_limits, [], [end for end, _ in pairs])
        runner = asyncio.create_task(side)
        try:
            given = json.dumps([list(tests), limits.timeout_s])
            await _side("tests", "", given, test_limits, [report.fileno()], [end for _, end in pairs])
            report.seek(0)
            # The last may be cut off, where the tests' side has met a limit.
            outcomes = [json.loads(line) for line in report if line.endswith(b"\n")]
            is_late = len(outcomes) < count or any(outcome is not None and outcome[1] for outcome in outcomes)
            ended = None if is_late else await runner
        finally:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
    passed = [outcome is None for outcome in outcomes] + [False] * (count - len(outcomes))
    return AssertionResult(tuple(passed), _report(ended, outcomes, limits))


async def _side(
    side: str, program: str, stdin: str, limits: Limits, kept: list[int], ends: list[socket.socket]
) -> SandboxResult:
    """One of the two sandboxes; the ends of its connections are closed here once it has them."""

    def close() -> None:
        for end in ends:
            end.close()

    inherited = [*kept, *(end.fileno() for end in ends)]
    return await run_now(program, stdin, limits, ["-c", _CHILD, side, *map(str, inherited)], inherited, close)


def _report(ended: SandboxResult | None, outcomes: Sequence[Any], limits: Limits) -> str:
    if ended is None:
        return f"ended: it took more than {limits.timeout_s:g} s"
    parts = [ended.stdout, ended.stderr, ended.reason]
    fault = next((outcome[0] for outcome in outcomes if outcome is not None), "")
    # A program that failed by itself has said how.
    if ended.exit == 0:
        parts.append(fault)
    return "\n".join(part.rstrip("\n") for part in parts if part)


def _checked(ground_truth: Any) -> Mapping[str, Any]:
    truth: Any = ground_truth
    with suppress(ValueError):
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(truth, Mapping) or len(truth.get("inputs") or ()) != len(truth.get("outputs") or ()):
        raise ValueError(
            f"the ground truth {ground_truth!r:.80} has no tests; give an object with as many inputs as outputs, or "
            "with assert_case"
        )
    return truth


def _pairs(truth: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    yield from zip(truth.get("inputs") or (), truth.get("outputs") or ())


def _calls(truth: Mapping[str, Any]) -> Iterator[str]:
    """Assertions of what the function of the program returns, where the data names one."""
    if not truth.get("fn_name"):
        return
    for given, expected in _pairs(truth):
        # One argument a line, as programming contests write them.
        arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
        result = json.loads(expected) if isinstance(expected, str) and isinstance(given, str) else expected
        yield _CALL.format(name=truth["fn_name"], arguments=json.dumps(arguments), expected=json.dumps(result))


def _dialogues(truth: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a program reads, and what it should print."""
    for given, expected in () if truth.get("fn_name") else _pairs(truth):
        yield given if isinstance(given, str) else "\n".join(map(str, given)), expected


def _lines(text: Any) -> list[str]:
    joined = text if isinstance(text, str) else "\n".join(map(str, text))
    return [line.rstrip() for line in joined.rstrip().split("\n")]
