"""Whether a program that a policy wrote passes tests written in Python, by the tests' word alone.

Program and tests run in two sandboxes (judge_child.py). How the program ends, what it prints and what it does to its
interpreter tell nothing; a value that it returns is compared where the program cannot reach.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.data.sandbox import Limits, SandboxResult, in_place, run_now

_CODE = Path(__file__).with_name("judge_child.py").read_text(encoding="utf-8")
START_S = 10.0
"""Seconds that the start of both sandboxes may take."""


@dataclass(frozen=True)
class Verdict:
    """What a program is worth."""

    passed: tuple[bool, ...]
    """Of each test. After one that took too long none is tried."""
    text: str
    """What somebody reads who has written the program: what it printed, and how its first test failed."""


def judge(program: str, tests: Sequence[str], limits: Limits | None = None) -> Verdict:
    """`judge_async` for code without an event loop, such as a reward function's."""
    return asyncio.run(judge_async(program, tests, limits))


async def judge_async(program: str, tests: Sequence[str], limits: Limits | None = None) -> Verdict:
    """Run a program, then each test on the program as its last line has left it.

    Args:
        program: Python.
        tests: Python, such as `assert add(1, 2) == 3`, with the program's names.
        limits: of each test, and of the program before them.
    """
    return await in_place(_judged(program, tests, limits or Limits()))


async def _judged(program: str, tests: Sequence[str], limits: Limits) -> Verdict:
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
    return Verdict(tuple(passed), _text(ended, outcomes, limits))


async def _side(
    side: str, program: str, stdin: str, limits: Limits, kept: list[int], ends: list[socket.socket]
) -> SandboxResult:
    """One of the two sandboxes; the ends of its connections are closed here once it has them."""

    def close() -> None:
        for end in ends:
            end.close()

    inherited = [*kept, *(end.fileno() for end in ends)]
    return await run_now(program, stdin, limits, ["-c", _CODE, side, *map(str, inherited)], inherited, close)


def _text(ended: SandboxResult | None, outcomes: Sequence[Any], limits: Limits) -> str:
    if ended is None:
        return f"ended: it took more than {limits.timeout_s:g} s"
    parts = [ended.stdout, ended.stderr, ended.reason]
    fault = next((outcome[0] for outcome in outcomes if outcome is not None), "")
    # A program that failed by itself has said how.
    if ended.exit == 0:
        parts.append(fault)
    return "\n".join(part.rstrip("\n") for part in parts if part)
