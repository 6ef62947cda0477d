"""Programs that a policy wrote, tried on the tests that a data set brings, in the sandbox.

What a program should print is compared here, and what its functions should return by a judge (judge.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from components.data.judge import judge
from components.data.sandbox import Limits, run_python

MOST_TESTS = 10
"""So many of a response's tests are run, the first ones."""
LIMITS = Limits(timeout_s=5.0, cpu_s=5, max_output=2**20)
"""Of each. All of a response's tests are done within the minute that reward code has for it."""

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
        passed += sum(judge(program, assertions, LIMITS).passed)
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
