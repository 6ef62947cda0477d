"""Programs that a policy wrote, tried on the tests that a data set brings, in the sandbox.

What a program should print is compared here. Assertions about what its functions return run in a sandbox of their own,
beside that of the program (code_test_child.py), and count by their word alone: how the program ends, what it prints and
what it does to its interpreter prove nothing; a value that it returns is compared where the program cannot reach.
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
"""So many of a response's tests are run, the first ones."""
LIMITS = Limits(timeout_s=5.0, cpu_s=5, max_output=2**20)
"""Of each."""
TOTAL_S = 48.0
"""Seconds for all tests of a response, from the start of the first one. What is not done by then counts as failed: with
the start, it is less than the minute that reward code has, so that no program decides whether its response has a score.
"""
START_S = 8.0
"""Seconds that the start of both sandboxes may take."""
GRACE_S = 1.0
"""Seconds that a program has to end once its tests are done; they count, however it ends."""

_MODULES = ("code_values", "code_link", "code_names", "code_test_child")
"""For both sandboxes, in which there is nothing of ours; each imports the ones before it."""
_CHILD = f"""\
import sys, types
for name, text in {[(name, Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")) for name in _MODULES]!r}:
    module = sys.modules["{__package__}." + name] = types.ModuleType("{__package__}." + name)
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
    program = program_in(solution_str)
    passed = asyncio.run(in_place(_passed(program, assertions, dialogues))) if program.strip() else 0
    return {"score": passed / count, "acc": float(passed == count)}


async def _passed(program: str, assertions: Sequence[str], dialogues: Sequence[tuple[str, Any]]) -> int:
    """The number of tests that a program passes."""
    ends_at = time.monotonic() + TOTAL_S
    passed = 0
    if assertions:
        passed += sum((await run_assertions_now(program, assertions, LIMITS, TOTAL_S)).passed)
    for given, expected in dialogues:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            break
        result = await run_now(program, given, replace(LIMITS, timeout_s=min(LIMITS.timeout_s, left_s)))
        passed += result.exit == 0 and not result.reason and same_lines(result.stdout, expected)
        if result.reason:  # what has met a limit once does so again
            break
    return passed


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


async def run_assertions_async(
    program: str, tests: Sequence[str], limits: Limits | None = None, total_s: float = math.inf
) -> AssertionResult:
    """Import a program, then run each test on the program as its last line has left it.

    Args:
        program: Python. It is imported: what stands under `if __name__ == "__main__"` is not run.
        tests: Python, such as `assert add(1, 2) == 3`, with the program's names.
        limits: of each test, and of the program before them.
        total_s: seconds for all of them; tests that have not ended by then have failed.
    """
    return await in_place(run_assertions_now(program, tests, limits or Limits(), total_s))


async def run_assertions_now(program: str, tests: Sequence[str], limits: Limits, total_s: float) -> AssertionResult:
    """`run_assertions_async` without a wait for a place."""
    count = len(tests)
    total_s = min(total_s, limits.timeout_s * (count + 1))
    side_limits = replace(limits, timeout_s=total_s + START_S)
    with ExitStack() as stack:
        report = stack.enter_context(BoundedPipe(limits.file_bytes))
        pairs = [[stack.enter_context(end) for end in socket.socketpair()] for _ in tests]
        is_done = asyncio.get_running_loop().create_future()
        side = _side("program", program, "", side_limits, [], [end for end, _ in pairs], is_done)
        runner = asyncio.create_task(side)
        try:
            given = json.dumps([list(tests), limits.timeout_s, total_s])
            await _side("tests", "", given, side_limits, [report.writing.fileno()], [end for _, end in pairs])
            # What the program has printed is complete once it has ended by itself.
            await asyncio.wait({runner}, timeout=GRACE_S)
            is_done.set_result(None)
            ended = await runner
        finally:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
        lines = report.text().splitlines(keepends=True)
    # The last may be cut off, where the tests' side has met a limit.
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
    """One of the two sandboxes; the ends of its connections are closed here once it has them."""

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
    # A program that failed by itself has said how. One that was ended here has not failed.
    if ended.exit > 0:
        parts.append(ended.reason)
    else:
        parts.append(next((outcome[0] for outcome in outcomes if outcome is not None), ""))
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
