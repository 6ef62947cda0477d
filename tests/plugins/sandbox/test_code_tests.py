"""Scores of programs by the tests of a data set."""

import json
from dataclasses import replace
from typing import Any

import pytest

from plugins.sandbox import code_tests
from plugins.sandbox.code_tests import code_score, program_in
from tests.messages import says

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Increase the time limits for a busy machine."""
    monkeypatch.setattr(code_tests, "LIMITS", replace(code_tests.LIMITS, timeout_s=60.0))


def score(response: str, truth: Any) -> tuple[float, float]:
    score = code_score("apps", response, truth)
    return score["score"], score["acc"]


def test_the_score_is_the_share_of_passed_tests() -> None:
    assert score(f"Look:\n```python\n{ADD}\n```\nIt prints\n```text\n3\n```", SUMS) == (1.0, 1.0)
    assert score("```python\nprint(3)\n```", json.dumps(SUMS)) == (0.5, 0.0)
    assert score(ADD, SUMS) == (1.0, 1.0)
    assert score("", SUMS) == (0.0, 0.0)
    # The program prints 3 but exits with an error.
    assert score("print(3)\nraise SystemExit(1)", SUMS) == (0.0, 0.0)


def test_a_function_is_called_and_an_assertion_is_run() -> None:
    calls = {"fn_name": "add", "inputs": [[1, 2], [3, 4], [5, 6]], "outputs": [3, [7], 12]}
    assert (
        score("class Solution:\n    def add(self, a, b):\n        print('hm')\n        return a + b", calls)[0] == 2 / 3
    )
    lines = {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}
    assert score("def add(a, b):\n    return a + b", lines) == (1.0, 1.0)
    asserted = {"assert_case": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}
    assert score("def add(a, b):\n    return a + b", asserted) == (0.5, 0.0)


def test_a_ground_truth_without_tests_is_refused() -> None:
    for truth in ("7", "{", {}, {"inputs": ["1"]}, {"inputs": [], "outputs": []}, {"inputs": "12", "outputs": "1"}):
        with pytest.raises(ValueError, match=says(f"{truth!r:.20}")):
            code_score("apps", ADD, truth)


def test_a_code_fence_without_a_newline_is_parsed_in_linear_time() -> None:
    for filling in ("a", " ", "\t", "a ", "```a"):
        text = f"```{filling * 100_000}"
        assert program_in(text) == text
