"""Programming tasks, scored by tests that the policy does not see until it fails one, and of which it never sees the
last: it reads that it failed, and where it is one of input and output what the program printed. So a label needs two
or more.

A label is a JSON object (or its text) with `tests`: pieces of Python that run after the program, such as
`assert add(1, 2) == 3`, or `{"input": "1 2", "output": "3"}`: what the program prints when it reads that.

The program is the last block of Python between lines of ```, or all of the text.

Program and tests run in sandboxes of their own (components/data/code_tests.py): a program finds no test, and nothing
that it does to its process passes one. A program that learns tests of input and output by heart, try by try, passes all
but the last. Look at responses when the score is too good.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from agents.environments import TextEnvironment, read_label
from components.data.code_tests import program_in, run_assertions_async, same_lines
from components.data.sandbox import Limits, cut, run_python_async

EXAMPLE = '{"tests": ["assert add(1, 2) == 3", {"input": "1 2", "output": "3"}]}'


class AgentInstance(TextEnvironment):
    """Reward and score 1 when every test passes, in any try."""

    tries: ClassVar[int] = 4
    limits: ClassVar[Limits] = Limits()
    """Of each test."""

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
        passed, fault = 0, None
        for test in self._tests:
            fault = await self._fault(program, test, is_last=passed == len(self._tests) - 1)
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

    async def _fault(self, program: str, test: str | dict[str, str], *, is_last: bool) -> str | None:
        """What the policy reads of a test that fails, in whole lines; None when it passes."""
        # All of the output is compared, and the policy reads some of it.
        limits, most = replace(self.limits, max_output=self.limits.file_bytes), self.limits.max_output
        if isinstance(test, str):
            found = await run_assertions_async(program, [test], limits)
            if all(found.passed):
                return None
            return "" if is_last else f"{test}\n{cut(found.text, most)}\n"
        result = await run_python_async(program, test["input"], limits)
        if result.exit == 0 and same_lines(result.stdout, test["output"]):
            return None
        parts = {"Input": test["input"], "Expected": test["output"], "Found": result.text}
        if is_last:
            del parts["Expected"]
        return "".join(f"{name}:\n{cut(text, most)}\n" for name, text in parts.items())
