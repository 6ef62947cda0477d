"""The shipped environments: who knows how reaches the reward, who does not gets none, and nonsense is answered."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from agents.environments import calculator, code, guess
from agents.loading import load_agent
from plugins.demo.tasks import GuessTask, WordTask
from plugins.sandbox.sandbox import Limits
from tests.agents.environment_cases import halving, play_untrained, rewards, run_episodes, saying, text_of, write_policy
from tests.messages import says

ADD = {"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(3, 4) == 7"]}
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give programs time on a busy machine."""
    monkeypatch.setattr(code.AgentInstance, "limits", Limits(timeout_s=60))


# guess


@pytest.mark.parametrize("row", GuessTask().rows("train", 20, seed=1))
def test_halving_finds_every_number_in_its_turns(row: dict[str, str]) -> None:
    limit = GuessTask().limit_of(row["input"])
    steps = run_episodes(guess.AgentInstance(), row["input"], row["label"], halving(1, limit, "<", ">"))
    assert rewards(steps) == [0.0] * (len(steps) - 1) + [1.0]
    assert steps[-1]["scores"] == 1.0 and len(steps) <= GuessTask.turns


def test_a_game_that_is_not_won_ends_after_its_turns_and_what_is_no_number_costs_one() -> None:
    steps = run_episodes(guess.AgentInstance(), "abc12:", "7", saying("12", "<", "", "3"))
    assert [step["environment_feedback"] for step in steps] == ["<", ":", ":", ">"]
    assert rewards(steps) == [0.0] * 4
    assert [step["done"] for step in steps] == [False, False, False, True]
    assert steps[-1]["extra_logs"] == {"guesses": 4, "invalid_guesses": 2}


def test_everything_that_the_guessing_game_says_is_in_its_tasks_alphabet() -> None:
    for said in ("9" * 5000, "x", "3", "7", "٣"):
        (step,) = run_episodes(guess.AgentInstance(), "abc12:", "5", saying(said), turns=1)
        assert set(step["environment_feedback"]) <= set(GuessTask.alphabet)


# calculator


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
def test_the_calculator_does_nothing_else_and_not_for_long(expression: str, fact: object) -> None:
    with pytest.raises(ValueError, match=says(fact)):
        calculator.calculator(expression)


# code


def test_code_that_passes_its_tests_is_rewarded_after_it_was_told_which_one_failed() -> None:
    wrong, right = "```python\ndef add(a, b): return 3\n```", "So:\n```\ndef add(a, b):\n    return a + b\n```\nDone."
    steps = run_episodes(code.AgentInstance(), "Write add(a, b).", json.dumps(ADD), saying(wrong, right))
    assert rewards(steps) == [0.0, 1.0]
    said = text_of(steps[0]["environment_feedback"])
    assert said.startswith("Test 2 of 3 failed.\nassert add(2, 2) == 4\nTraceback")
    assert "AssertionError" in said and "add(1, 2)" not in said
    assert [step["extra_logs"]["passed_share"] for step in steps] == [pytest.approx(1 / 3), 1.0]


def test_the_last_test_is_never_told() -> None:
    (step,) = run_episodes(
        code.AgentInstance(),
        "",
        ADD,
        saying("add = {(1, 2): 3, (2, 2): 4}.get\nadd = lambda a, b: min(a + b, 4)"),
        turns=1,
    )
    assert text_of(step["environment_feedback"]) == "Test 3 of 3 failed.\nTry again.\n"
    (step,) = run_episodes(code.AgentInstance(), "", {"tests": "assert add(1, 2) == 3"}, saying("add = max"), turns=1)
    assert text_of(step["environment_feedback"]) == "Test 1 of 1 failed.\nTry again.\n"
    (step,) = run_episodes(
        code.AgentInstance(), "", {"tests": [{"input": "1", "output": "2"}]}, saying("print(3)"), turns=1
    )
    assert text_of(step["environment_feedback"]) == "Test 1 of 1 failed.\nInput:\n1\nFound:\n3\nTry again.\n"


@pytest.mark.parametrize(
    "look",
    [
        "open(__file__).read()",
        "os.pread(0, 9999, 0).decode()",
        "repr(globals())",
        "repr(vars(sys.modules['__main__']))",
    ],
)
def test_a_program_finds_neither_test_nor_mark_where_it_may_look_by_the_way(look: str) -> None:
    program = (
        f"import os, sys\nadd = max\nprint('found:', [line for line in ({look}).splitlines() if 'assert' in line])"
    )
    (step,) = run_episodes(code.AgentInstance(), "", ADD, saying(program), turns=1)
    said = text_of(step["environment_feedback"])
    assert "found: []" in said or 'found: ["print' in said or "['print" in said, said


@pytest.mark.parametrize("trick", ["exec = lambda *_: None", "print = compile = str", "import os\nos.write = print"])
def test_a_program_that_redefines_what_tests_it_gains_nothing(trick: str) -> None:
    (step,) = run_episodes(code.AgentInstance(), "", ADD, saying(f"{trick}\nadd = max"), turns=1)
    assert step["rewards"] == 0.0
    (step,) = run_episodes(code.AgentInstance(), "", ADD, saying(f"{trick}\ndef add(a, b): return a + b"), turns=1)
    assert step["rewards"] == 1.0


def test_a_fault_is_shown_at_its_line_of_the_program() -> None:
    program = "def add(a, b):\n    return 1 / 0"
    (step,) = run_episodes(code.AgentInstance(), "", ADD, saying(program), turns=1)
    assert text_of(step["environment_feedback"]) == (
        "Test 1 of 3 failed.\nassert add(1, 2) == 3\nTraceback (most recent call last):\n"
        '  File "<test>", line 1, in <module>\n  File "main.py", line 2, in add\n    return 1 / 0\n'
        "           ~~^~~\nZeroDivisionError: division by zero\nTry again.\n"
    )


RIGHT, WRONG = "add = lambda a, b: a + b", "add = max"


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{RIGHT}\n```\nRun it:\n```bash\npython main.py\n```\nIt prints:\n```text\n3\n```\n",
        f"```bash\nls\n```\n```Python3\n{RIGHT}\n```\n",
        f"```py\n{WRONG}\n```\nNo:\n``` python title=x\n{RIGHT}\n",
        f"```\n{RIGHT}\n```",
        RIGHT,
    ],
)
def test_the_last_block_of_python_is_the_program(text: str) -> None:
    (step,) = run_episodes(code.AgentInstance(), "", {"tests": ADD["tests"][:1]}, saying(text), turns=1)
    assert step["rewards"] == 1.0


def test_all_tests_of_a_try_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code.AgentInstance, "total_s", 3.0)
    tests = [{"input": "", "output": "x"}] * 50
    (step,) = run_episodes(
        code.AgentInstance(), "", {"tests": tests}, saying("import time\ntime.sleep(1)\nprint('x')"), turns=1
    )
    assert step["rewards"] == 0.0
    # Each alone would pass: its limit is 60 s.
    assert 0 < step["extra_logs"]["passed_share"] <= 3 / 50


def test_a_program_is_judged_by_all_that_it_prints() -> None:
    label = {
        "tests": [{"input": "3", "output": "0\n1\n2\n"}, {"input": "5000", "output": "\n".join(map(str, range(5000)))}]
    }
    wrong, right = "print(0)", "for i in range(int(input())): print(i, end=' \\n')"
    steps = run_episodes(code.AgentInstance(), "Count.", label, saying(wrong, right))
    assert rewards(steps) == [0.0, 1.0]
    said = text_of(steps[0]["environment_feedback"])
    assert said == "Test 1 of 2 failed.\nInput:\n3\nExpected:\n0\n1\n2\n\nFound:\n0\nTry again.\n"


@pytest.mark.parametrize("trick", ["raise SystemExit", "import os; os._exit(0)", "def add(a, b):", "[" * 200])
def test_a_program_that_ends_early_or_is_none_passes_no_test(trick: str) -> None:
    (step,) = run_episodes(code.AgentInstance(), "", ADD, saying(trick), turns=1)
    assert (step["rewards"], step["scores"]) == (0.0, 0.0)


def test_the_tries_are_limited() -> None:
    steps = run_episodes(code.AgentInstance(), "", ADD, lambda _said: "add = max")
    assert rewards(steps) == [0.0] * 4 and steps[-1]["extra_logs"]["tries"] == 4


# all


@pytest.mark.parametrize("name", ["textarena", "gymnasium"])
def test_a_library_that_is_not_installed_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=says(f"env:{name}", "scripts/setup.sh recipes games")):
        load_agent(f"env:{name}")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learnt nothing, with a chat template."""
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize(
    ("name", "label"),
    [("guess", "7"), ("calculator", "#### 7"), ("code", json.dumps(ADD))],
)
def test_an_untrained_policy_plays_every_environment_without_an_error(name: str, label: Any, policy: Path) -> None:
    play_untrained(name, label, policy)
