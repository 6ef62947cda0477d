"""Score programs that a policy wrote by the tests of a data set, in the sandbox.

Printed output is compared here. Assertions about returned values run in a separate sandbox beside that of the program
(code_test_child.py), and only their result counts. The program's exit code, its output and changes to its interpreter
prove nothing. Returned values are compared in a process that the program cannot reach.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plugins.sandbox.sandbox import BoundedPipe, Limits, SandboxResult, in_place, run_now

MOST_TESTS = 10
"""Maximum number of tests per response. The first ones are run."""
LIMITS = Limits(timeout_s=5.0, cpu_s=5, max_output=2**20)
"""Limits of each test."""
TOTAL_S = 48.0
"""Maximum number of seconds for all tests of a response, from the start of the first one. Unfinished tests count as
failed. Together with the start it is below the minute that reward code may take, so that no program can prevent its
response from getting a score."""
START_S = 8.0
"""Maximum number of seconds until both sandboxes have started."""
GRACE_S = 1.0
"""Number of seconds that a program has to end after its tests. The tests count in any case."""

_MODULES = ("code_values", "code_link", "code_names", "code_test_child")
"""Modules for both sandboxes, which cannot import this project. Each module imports earlier ones only."""
_PACKAGE = __name__.rpartition(".")[0]
_CHILD = f"""\
import sys, types
for name, text in {[(name, Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")) for name in _MODULES]!r}:
    module = sys.modules[f"{_PACKAGE}.{{name}}"] = types.ModuleType(f"{_PACKAGE}.{{name}}")
    exec(compile(text, name, "exec"), vars(module))
module.main(sys.argv[1:])
"""
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
    """Return the share of tests that a response's program passes, and as `acc` 1.0 if it passes all of them.

    Args:
        data_source: ignored.
        solution_str: the response. The program is its last block of Python, or all of it if it has no such block.
        ground_truth: an object, or JSON of one. It has `inputs` and `outputs`, lists of the input and the output of a
            program, or with `fn_name` of the arguments and the result of its function; or `assert_case`, a list of
            assertions.
        extra_info: ignored.

    Raises:
        ValueError: the ground truth has none of these.
    """
    truth = _checked(ground_truth)
    assertions = [*(truth.get("assert_case") or ()), *_calls(truth)][:MOST_TESTS]
    dialogues = list(_dialogues(truth))[: MOST_TESTS - len(assertions)]
    count = len(assertions) + len(dialogues)
    if not count:
        raise ValueError(f"the ground truth {ground_truth!r:.80} has no tests")
    program = program_in(solution_str)
    passed = asyncio.run(in_place(_passed(program, assertions, dialogues))) if program.strip() else 0
    return {"score": passed / count, "acc": float(passed == count)}


async def _passed(program: str, assertions: Sequence[str], dialogues: Sequence[tuple[str, Any]]) -> int:
    """Return the number of tests that a program passes."""
    ends_at = time.monotonic() + TOTAL_S
    passed = 0
    if assertions:
        passed += sum((await run_assertions_now(program, assertions, LIMITS, TOTAL_S)).passed)
    for stdin, expected in dialogues:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            break
        result = await run_now(program, stdin, replace(LIMITS, timeout_s=min(LIMITS.timeout_s, left_s)))
        passed += result.exit == 0 and not result.reason and same_lines(result.stdout, expected)
        if result.reason:  # a program that exceeded a limit would exceed it in the other tests too
            break
    return passed


def program_in(text: str) -> str:
    """Return the last block of Python between ```, or the whole text if there is none."""
    blocks = [code for language, code in _BLOCK.findall(text) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else text


def same_lines(printed: str, expected: str | Iterable[object]) -> bool:
    """Return True if the lines are equal, apart from white space at their ends and blank lines at the end."""
    return _lines(printed) == _lines(expected)


@dataclass(frozen=True)
class AssertionResult:
    """Result of assertions about a program."""

    passed: tuple[bool, ...]
    """True for each assertion that passed. After an assertion that took too long no further one runs."""
    text: str
    """Text for the author of the program: its output, and the failure of the first failed test."""


def run_assertions(program: str, tests: Sequence[str], limits: Limits | None = None) -> AssertionResult:
    """Run `run_assertions_async` in code without an event loop, such as a reward function."""
    return asyncio.run(run_assertions_async(program, tests, limits))


async def run_assertions_async(
    program: str, tests: Sequence[str], limits: Limits | None = None, total_s: float = math.inf
) -> AssertionResult:
    """Import a program, then run each test from the state of the program after the import.

    Args:
        program: Python code. Code under `if __name__ == "__main__"` does not run.
        tests: Python code, such as `assert add(1, 2) == 3`, which uses the program's names.
        limits: limits of each test, and of the import of the program.
        total_s: maximum number of seconds for all tests. Unfinished tests count as failed.
    """
    return await in_place(run_assertions_now(program, tests, limits or Limits(), total_s))


async def run_assertions_now(program: str, tests: Sequence[str], limits: Limits, total_s: float) -> AssertionResult:
    """Run `run_assertions_async` without waiting for a free slot."""
    count = len(tests)
    # The import of the program has the time limit of one further test.
    total_s = min(total_s, limits.timeout_s * (count + 1))
    side_limits = replace(limits, timeout_s=total_s + START_S)
    with ExitStack() as stack:
        report = stack.enter_context(BoundedPipe(limits.file_bytes))
        pairs = [[stack.enter_context(end) for end in socket.socketpair()] for _ in tests]
        is_done = asyncio.get_running_loop().create_future()
        side = _side("program", program, "", side_limits, [], [end for end, _ in pairs], is_done)
        runner = asyncio.create_task(side)
        try:
            stdin = json.dumps([list(tests), limits.timeout_s, total_s])
            await _side("tests", "", stdin, side_limits, [report.writing.fileno()], [end for _, end in pairs])
            # The program's output is only complete if it ends by itself.
            await asyncio.wait({runner}, timeout=GRACE_S)
            is_done.set_result(None)
            ended = await runner
        finally:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
        lines = report.text().splitlines(keepends=True)
    # The last line may be incomplete if the tests' side exceeded a limit.
    outcomes = [json.loads(line) for line in lines if line.endswith("\n")]
    passed = [outcome is None for outcome in outcomes] + [False] * (count - len(outcomes))
    return AssertionResult(tuple(passed), _report(ended, outcomes, count, limits))


async def _side(
    side: str,
    program: str,
    stdin: str,
    limits: Limits,
    kept: list[int],
    ends: list[socket.socket],
    until: asyncio.Future[Any] | None = None,
) -> SandboxResult:
    """Run one of the two sandboxes. The ends of its connections are closed here once the sandbox has them."""

    def close() -> None:
        for end in ends:
            end.close()

    inherited = [*kept, *(end.fileno() for end in ends)]
    return await run_now(
        program, stdin, limits, ["-c", _CHILD, side, *map(str, inherited)], inherited, close, until=until
    )


def _report(ended: SandboxResult, outcomes: Sequence[Any], count: int, limits: Limits) -> str:
    if len(outcomes) < count or any(outcome is not None and outcome[1] for outcome in outcomes):
        return f"ended: it took more than {limits.timeout_s:g} s"
    parts = [ended.stdout, ended.stderr]
    # A program that failed by itself has printed an error. A program that was ended here has not failed.
    if ended.exit > 0:
        parts.append(ended.reason)
    else:
        parts.append(next((outcome[0] for outcome in outcomes if outcome is not None), ""))
    return "\n".join(part.rstrip("\n") for part in parts if part)


def _checked(ground_truth: Any) -> Mapping[str, Any]:
    truth: Any = ground_truth
    if isinstance(ground_truth, str):
        with suppress(ValueError):
            truth = json.loads(ground_truth)
    if not isinstance(truth, Mapping) or len(truth.get("inputs") or ()) != len(truth.get("outputs") or ()):
        raise ValueError(
            f"the ground truth {ground_truth!r:.80} has no tests; give an object with as many inputs as outputs, or "
            "with assert_case"
        )
    return truth


def _pairs(truth: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    yield from zip(truth.get("inputs") or (), truth.get("outputs") or ())


def _calls(truth: Mapping[str, Any]) -> Iterator[str]:
    """Yield assertions about the results of the function that the data names, if it names one."""
    if not truth.get("fn_name"):
        return
    for stdin, expected in _pairs(truth):
        arguments, result = stdin, expected
        if isinstance(stdin, str):
            # One argument per line, as programming contests write them.
            arguments = [json.loads(line) for line in stdin.splitlines()]
            result = json.loads(expected) if isinstance(expected, str) else expected
        yield _CALL.format(name=truth["fn_name"], arguments=json.dumps(arguments), expected=json.dumps(result))


def _dialogues(truth: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the input and the expected output of programs, unless the data names a function."""
    if not truth.get("fn_name"):
        yield from ((_joined(stdin), expected) for stdin, expected in _pairs(truth))


def _joined(text: Any) -> str:
    return text if isinstance(text, str) else "\n".join(map(str, text))


def _lines(text: Any) -> list[str]:
    return [line.rstrip() for line in _joined(text).rstrip().split("\n")]
