"""The environment `env:code`: programming tasks, scored by tests.

The policy does not see a test until it fails one, and it never sees the last: it reads that it failed, and where it is
one of input and output what the program printed. So a label needs two or more.

A label is a JSON object (or its text) with `tests`: pieces of Python that run after the program, such as
`assert add(1, 2) == 3`, or `{"input": "1 2", "output": "3"}`: what the program prints when it reads that.

The program is the last block of Python between lines of ```, or all of the text.

Program and tests run in sandboxes of their own (plugins/sandbox/code_tests.py): a program finds no test, and nothing
that it does to its process passes one. A program that learns tests of input and output by heart, try by try, passes all
but the last. Look at responses when the score is too good.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar

from agents.environments import TextEnvironment, read_label
from components.process.child_process import cut_text
from plugins.sandbox.code_tests import program_in, run_assertions_now, same_lines
from plugins.sandbox.sandbox import Limits, in_place, run_now

EXAMPLE = '{"tests": ["assert add(1, 2) == 3", {"input": "1 2", "output": "3"}]}'


class AgentInstance(TextEnvironment):
    """Reward and score 1 when every test passes, in any try."""

    tries: ClassVar[int] = 4
    limits: ClassVar[Limits] = Limits()
    """Of each test."""
    total_s: ClassVar[float] = 40.0
    """Seconds for all tests of a try, below agent.step_timeout_s: a program that takes long in each of many tests has
    failed one, and does not end its episode. Waiting for a place to run (see `run_python_async`) does not count."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - room for more
        """Begin with the prompt."""
        self._tried = 0
        self._tests = read_label(states["label"], "tests", EXAMPLE)["tests"]
        if isinstance(self._tests, str):
            self._tests = [self._tests]
        if not self._tests or not all(isinstance(t, str) or {"input", "output"} <= {*t} for t in self._tests):
            raise ValueError(f"the label's tests are {str(self._tests)[:200]!r}; give some, such as {EXAMPLE}")
        return {"observation": self.says(states["observation"])}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Run the tests up to the first that fails."""
        self._tried += 1
        program = program_in(states["action_text"])
        passed = 0
        fault = None
        used_s = 0.0
        for test in self._tests:
            left_s = self.total_s - used_s
            if left_s <= 0:
                fault = f"All tests together took more than {self.total_s:g} s.\n"
                break
            is_last = passed == len(self._tests) - 1
            fault, seconds = await in_place(self._timed_fault(program, test, left_s, is_last=is_last))
            used_s += seconds
            if fault is not None:
                break
            passed += 1
        solved = float(fault is None)
        failed = f"Test {passed + 1} of {len(self._tests)} failed.\n{fault}Try again.\n"
        return {
            "rewards": solved,
            "scores": solved,
            "environment_feedback": self.says("All tests passed.\n" if solved else failed),
            "done": bool(solved) or self._tried >= self.tries,
            "extra_logs": {"tries": self._tried, "passed_share": passed / len(self._tests)},
        }

    async def _timed_fault(
        self, program: str, test: str | dict[str, str], left_s: float, *, is_last: bool
    ) -> tuple[str | None, float]:
        """`_fault`, and the seconds that the test took."""
        began = time.monotonic()
        fault = await self._fault(program, test, left_s, is_last=is_last)
        return fault, time.monotonic() - began

    async def _fault(self, program: str, test: str | dict[str, str], left_s: float, *, is_last: bool) -> str | None:
        """What the policy reads of a test that fails, in whole lines; None when it passes."""
        # All of the output is compared, and the policy reads some of it.
        limits = replace(self.limits, max_output=self.limits.file_bytes, timeout_s=min(self.limits.timeout_s, left_s))
        most = self.limits.max_output
        if isinstance(test, str):
            found = await run_assertions_now(program, [test], limits, left_s)
            if all(found.passed):
                return None
            return "" if is_last else f"{test}\n{cut_text(found.text, most)}\n"
        result = await run_now(program, test["input"], limits)
        if result.exit == 0 and not result.reason and same_lines(result.stdout, test["output"]):
            return None
        parts = {"Input": test["input"], "Expected": test["output"], "Found": result.text}
        if is_last:
            del parts["Expected"]
        return "".join(f"{name}:\n{cut_text(text, most)}\n" for name, text in parts.items())
