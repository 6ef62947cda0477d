"""The environment `env:code`: programming tasks, scored by tests.

The policy sees a test only when it fails that test. It never sees the last test: it reads that the test failed, and for
a test of input and output what the program printed. A label therefore needs at least two tests.

A label is a JSON object (or its text) with `tests`. A test is Python code that runs after the program, such as
`assert add(1, 2) == 3`, or `{"input": "1 2", "output": "3"}`: the output that the program prints for this input.

The program is the last block of Python between lines of ```, or the whole text.

Program and tests run in separate sandboxes (plugins/sandbox/code_tests.py). A program cannot find a test, and it cannot
pass one by changing its process. A program that memorizes the tests of input and output, try by try, passes all but the
last. If a score is surprisingly good, look at the responses.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar

from agents.environments import TextEnvironment, read_label
from components.process.programs import cut_text
from plugins.sandbox.code_tests import program_in, run_assertions_now, same_lines
from plugins.sandbox.sandbox import Limits, in_place, run_now

EXAMPLE = '{"tests": ["assert add(1, 2) == 3", {"input": "1 2", "output": "3"}]}'


class AgentInstance(TextEnvironment):
    """Environment of one programming task. Reward and score are 1 if all tests pass in one of the tries."""

    tries: ClassVar[int] = 4
    limits: ClassVar[Limits] = Limits()
    """Limits of each test."""
    total_s: ClassVar[float] = 40.0
    """Maximum number of seconds for all tests of a try. It is below agent.step_timeout_s, so that a program that is
    slow in many tests fails a test instead of ending its episode. Waiting for a free slot (see `run_python_async`) does
    not count."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - room for more
        """Start an episode with the prompt as its observation.

        Raises:
            ValueError: the label has no valid tests.
        """
        self._tried = 0
        self._tests = read_label(states["label"], "tests", EXAMPLE)["tests"]
        if isinstance(self._tests, str):
            self._tests = [self._tests]
        if not self._tests or not all(isinstance(t, str) or {"input", "output"} <= {*t} for t in self._tests):
            raise ValueError(f"the label's tests are {str(self._tests)[:200]!r}; give some, such as {EXAMPLE}")
        return {"observation": self.as_feedback(states["observation"])}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Run the tests until one fails."""
        self._tried += 1
        program = program_in(states["action_text"])
        passed = 0
        fault = None
        used_s = 0.0
        for test in self._tests:
            # Only the time of tests counts, not the wait for a free slot.
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
            "environment_feedback": self.as_feedback("All tests passed.\n" if solved else failed),
            "done": bool(solved) or self._tried >= self.tries,
            "extra_logs": {"tries": self._tried, "passed_share": passed / len(self._tests)},
        }

    async def _timed_fault(
        self, program: str, test: str | dict[str, str], left_s: float, *, is_last: bool
    ) -> tuple[str | None, float]:
        """Return the result of `_fault`, and the seconds that the test took."""
        began = time.monotonic()
        fault = await self._fault(program, test, left_s, is_last=is_last)
        return fault, time.monotonic() - began

    async def _fault(self, program: str, test: str | dict[str, str], left_s: float, *, is_last: bool) -> str | None:
        """Return the text that the policy reads after a failed test, in whole lines, or None if the test passed."""
        # The comparison needs the full output. The policy reads at most `max_output` characters of it.
        limits = replace(self.limits, max_output=self.limits.file_bytes, timeout_s=min(self.limits.timeout_s, left_s))
        most = self.limits.max_output
        if isinstance(test, str):
            assertion = await run_assertions_now(program, [test], limits, left_s)
            if all(assertion.passed):
                return None
            return "" if is_last else f"{test}\n{cut_text(assertion.text, most)}\n"
        result = await run_now(program, test["input"], limits)
        if result.exit == 0 and not result.reason and same_lines(result.stdout, test["output"]):
            return None
        parts = {"Input": test["input"], "Expected": test["output"], "Found": result.text}
        # The expected output of the last test stays hidden, so that a program cannot memorize it.
        if is_last:
            del parts["Expected"]
        return "".join(f"{name}:\n{cut_text(text, most)}\n" for name, text in parts.items())
