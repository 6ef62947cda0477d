"""Shipped environments: correct play gets the reward, wrong play gets none, and nonsense gets a reply."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from agents.environments import calculator
from agents.loading import load_agent
from plugins.demo.tasks import WordTask
from tests.agents.environment_cases import play_untrained, rewards, run_episodes, saying, write_policy
from tests.messages import says

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'


def test_word_problems_are_solved_with_a_calculator() -> None:
    (row,) = WordTask().rows("train", 1, seed=3)
    first, second, response = re.split(r" #### | ", row["label"])
    calls = CALL % first.partition("=")[0] + CALL % second.partition("=")[0]
    steps = run_episodes(calculator.AgentInstance(), row["input"], row["label"], saying(calls, f"So #### {response}"))
    assert [message["content"] for message in steps[0]["environment_feedback"]] == [
        first.partition("=")[2],
        second.partition("=")[2],
    ]
    assert rewards(steps) == [0.0, 1.0]
    assert steps[-1]["extra_logs"] == {"tool_calls": 2, "tool_errors": 0}
    assert rewards(run_episodes(calculator.AgentInstance(), row["input"], row["label"], saying("#### 99"))) == [0.0]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 2.50", "17.5"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("-7 // 2", "-4"),
        ("7 % 4 ** 1", "3"),
        ("0.1 + 0.2", "0.3"),
        ("2**64", "18446744073709551616"),
        (" +1", "1"),
    ],
)
def test_the_calculator_does_arithmetic(expression: str, value: str) -> None:
    assert calculator.calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "fact"),
    [
        ("", "''"),
        ("1 +", "'1 +'"),
        ("1 if 1 else 2", "1 if 1 else 2"),
        ("__import__('os').system('true')", "__import__"),
        ("abs(1)", "abs(1)"),
        ("True + 1", "'True'"),
        ("'a' * 9", "'a'"),
        ("9 ** 9 ** 9", 9**9),
        ("(10 ** 64) ** 64", "(10 ** 64) ** 64"),
        ("1e308 * 10", "1e+308"),
        ("(-1) ** 0.5", "(-1) ** 0.5"),
        ("(" * 100 + "1" + ")" * 101, 202),
        ("1" * 300, 300),
        ("\0", r"\x00"),
    ],
)
def test_the_calculator_rejects_other_code_and_expensive_expressions(expression: str, fact: object) -> None:
    with pytest.raises(ValueError, match=says(fact)):
        calculator.calculator(expression)


@pytest.mark.parametrize("name", ["textarena", "gymnasium"])
def test_a_library_that_is_not_installed_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=says(f"env:{name}", "scripts/setup.sh recipes games")):
        load_agent(f"env:{name}")


def test_an_untrained_policy_runs_episodes_without_errors(tmp_path: Path) -> None:
    play_untrained("calculator", "#### 7", write_policy(tmp_path))
