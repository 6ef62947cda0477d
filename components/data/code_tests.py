"""Programs that a policy wrote, tried on the tests that a data set brings, in the sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from components.data.sandbox import Limits, run_python

MOST_TESTS = 10
"""So many of a response's tests are run, the first ones."""
LIMITS = Limits(timeout_s=5.0, cpu_s=5, max_output=2**20)
"""Of each. All of a response's tests are done within the minute that reward code has for it."""

_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
_CALL = """
import json
_function = Solution().{name} if "Solution" in globals() else {name}
print()
print(json.dumps(_function(*json.loads({arguments!r}))))
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
    tests = list(_tests(ground_truth))[:MOST_TESTS]
    if not tests:
        raise ValueError(f"the ground truth {ground_truth!r:.80} has no tests")
    blocks = [code for language, code in _BLOCK.findall(solution_str) if language.strip() in ("", "python", "py")]
    program, passed = (blocks[-1] if blocks else solution_str), 0
    for addition, given, expected in tests if program.strip() else ():
        result = run_python(program + addition, given, LIMITS)
        passed += result.exit == 0 and _is_expected(result.stdout, expected)
        if result.reason:  # what has met a limit once does so again
            break
    return {"score": passed / len(tests), "acc": float(passed == len(tests))}


def _tests(ground_truth: Any) -> Iterator[tuple[str, str, Any]]:
    """What is added to the program, what it reads, and the text or the value that it should write; None: anything."""
    truth: Any = ground_truth
    with suppress(ValueError):
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(truth, Mapping) or len(truth.get("inputs") or ()) != len(truth.get("outputs") or ()):
        raise ValueError(
            f"the ground truth {ground_truth!r:.80} has no tests; give an object with as many inputs as outputs, or "
            "with assert_case"
        )
    for assertion in truth.get("assert_case") or ():
        yield f"\n{assertion}\n", "", None
    for given, expected in zip(list[Any](truth.get("inputs") or ()), list[Any](truth.get("outputs") or ())):
        if not truth.get("fn_name"):
            yield "", given if isinstance(given, str) else "\n".join(map(str, given)), expected
            continue
        # One argument a line, as programming contests write them.
        arguments = [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else given
        result = json.loads(expected) if isinstance(expected, str) and isinstance(given, str) else expected
        yield _CALL.format(name=truth["fn_name"], arguments=json.dumps(arguments)), "", (result,)


def _is_expected(written: str, expected: Any) -> bool:
    if isinstance(expected, tuple):
        with suppress(ValueError, IndexError):
            value = json.loads(written.splitlines()[-1])
            return value == expected[0] or [value] == expected[0]  # some data sets put results into lists
        return False
    return expected is None or _lines(written) == _lines(expected)


def _lines(text: Any) -> list[str]:
    joined = text if isinstance(text, str) else "\n".join(map(str, text))
    return [line.rstrip() for line in joined.rstrip().split("\n")]
