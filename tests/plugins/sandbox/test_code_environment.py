"""Programming tasks: a program that passes its tests is rewarded, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plugins.sandbox.code_environment import AgentInstance
from plugins.sandbox.sandbox import Limits
from tests.agents.environment_cases import play_untrained, rewards, run_episodes, saying, text_of, write_policy

ADD = {"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(3, 4) == 7"]}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Increase the time limits for a busy machine."""
    monkeypatch.setattr(AgentInstance, "limits", Limits(timeout_s=60))


def test_a_failed_test_is_fed_back_and_a_passing_program_is_rewarded() -> None:
    wrong = "```python\ndef add(a, b): return 3\n```"
    right = "So:\n```\ndef add(a, b):\n    return a + b\n```\nDone."
    steps = run_episodes(AgentInstance(), "Write add(a, b).", json.dumps(ADD), saying(wrong, right))
    assert rewards(steps) == [0.0, 1.0]
    said = text_of(steps[0]["environment_feedback"])
    assert said.startswith("Test 2 of 3 failed.\nassert add(2, 2) == 4\nTraceback")
    assert "AssertionError" in said and "add(1, 2)" not in said
    assert [step["extra_logs"]["passed_share"] for step in steps] == [pytest.approx(1 / 3), 1.0]


def test_the_last_test_is_never_shown() -> None:
    (step,) = run_episodes(
        AgentInstance(),
        "",
        ADD,
        saying("add = {(1, 2): 3, (2, 2): 4}.get\nadd = lambda a, b: min(a + b, 4)"),
        turns=1,
    )
    assert text_of(step["environment_feedback"]) == "Test 3 of 3 failed.\nTry again.\n"
    (step,) = run_episodes(AgentInstance(), "", {"tests": "assert add(1, 2) == 3"}, saying("add = max"), turns=1)
    assert text_of(step["environment_feedback"]) == "Test 1 of 1 failed.\nTry again.\n"
    (step,) = run_episodes(AgentInstance(), "", {"tests": [{"input": "1", "output": "2"}]}, saying("print(3)"), turns=1)
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
def test_a_program_cannot_find_tests_in_its_process_or_files(look: str) -> None:
    program = (
        f"import os, sys\nadd = max\nprint('found:', [line for line in ({look}).splitlines() if 'assert' in line])"
    )
    (step,) = run_episodes(AgentInstance(), "", ADD, saying(program), turns=1)
    said = text_of(step["environment_feedback"])
    assert "found: []" in said or 'found: ["print' in said or "['print" in said, said


@pytest.mark.parametrize("trick", ["exec = lambda *_: None", "print = compile = str", "import os\nos.write = print"])
def test_a_program_that_redefines_test_functions_gains_nothing(trick: str) -> None:
    (step,) = run_episodes(AgentInstance(), "", ADD, saying(f"{trick}\nadd = max"), turns=1)
    assert step["rewards"] == 0.0
    (step,) = run_episodes(AgentInstance(), "", ADD, saying(f"{trick}\ndef add(a, b): return a + b"), turns=1)
    assert step["rewards"] == 1.0


def test_feedback_has_the_line_of_the_error_in_the_program() -> None:
    program = "def add(a, b):\n    return 1 / 0"
    (step,) = run_episodes(AgentInstance(), "", ADD, saying(program), turns=1)
    assert text_of(step["environment_feedback"]) == (
        "Test 1 of 3 failed.\nassert add(1, 2) == 3\nTraceback (most recent call last):\n"
        '  File "<test>", line 1, in <module>\n  File "main.py", line 2, in add\n    return 1 / 0\n'
        "           ~~^~~\nZeroDivisionError: division by zero\nTry again.\n"
    )


RIGHT = "add = lambda a, b: a + b"
WRONG = "add = max"


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
    (step,) = run_episodes(AgentInstance(), "", {"tests": ADD["tests"][:1]}, saying(text), turns=1)
    assert step["rewards"] == 1.0


def test_all_tests_of_a_try_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AgentInstance, "total_s", 3.0)
    tests = [{"input": "", "output": "x"}] * 50
    (step,) = run_episodes(
        AgentInstance(),
        "",
        {"tests": tests},
        saying("import time\ntime.sleep(1)\nprint('x')"),
        turns=1,
    )
    assert step["rewards"] == 0.0
    # Each test alone would pass: its limit is 60 s.
    assert 0 < step["extra_logs"]["passed_share"] <= 3 / 50


def test_the_full_output_of_a_program_is_compared() -> None:
    label = {
        "tests": [{"input": "3", "output": "0\n1\n2\n"}, {"input": "5000", "output": "\n".join(map(str, range(5000)))}]
    }
    wrong = "print(0)"
    right = "for i in range(int(input())): print(i, end=' \\n')"
    steps = run_episodes(AgentInstance(), "Count.", label, saying(wrong, right))
    assert rewards(steps) == [0.0, 1.0]
    said = text_of(steps[0]["environment_feedback"])
    assert said == "Test 1 of 2 failed.\nInput:\n3\nExpected:\n0\n1\n2\n\nFound:\n0\nTry again.\n"


@pytest.mark.parametrize("trick", ["raise SystemExit", "import os; os._exit(0)", "def add(a, b):", "[" * 200])
def test_a_program_that_ends_early_or_is_missing_passes_no_test(trick: str) -> None:
    (step,) = run_episodes(AgentInstance(), "", ADD, saying(trick), turns=1)
    assert (step["rewards"], step["scores"]) == (0.0, 0.0)


def test_the_tries_are_limited() -> None:
    steps = run_episodes(AgentInstance(), "", ADD, lambda _said: "add = max")
    assert rewards(steps) == [0.0] * 4 and steps[-1]["extra_logs"]["tries"] == 4


def test_an_untrained_policy_plays_without_errors(tmp_path: Path) -> None:
    play_untrained("code", json.dumps(ADD), write_policy(tmp_path))
