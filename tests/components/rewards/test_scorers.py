"""Scorers by name."""

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from components.rewards.scorers import default_scorer, exact_match, get_scorer, register_scorer, scorer_names
from plugins.math_scorers.scorers import gsm8k, gsm8k_flexible, math_answer
from tests.gsm8k_rows import gsm8k_rows
from tests.messages import says

PROJECT = Path(__file__).resolve().parents[3]


def test_a_registered_scorer_is_loaded_by_its_unique_name() -> None:
    register_scorer("length_of_test", lambda response, label: len(response) / len(label))
    assert get_scorer("length_of_test")("ab", "abcd") == 0.5
    assert {"length_of_test", "exact_match", "gsm8k", "gsm8k_flexible", "math", "sort"} <= set(scorer_names())
    for name in ("length_of_test", "sort"):
        with pytest.raises(ValueError, match=says(f"'{name}'")):
            register_scorer(name, exact_match)
    with pytest.raises(ValueError, match=says("'sorted'", "length_of_test", "exact_match", ".py")):
        get_scorer("sorted")


def test_exact_match_ignores_white_space_at_the_ends_only() -> None:
    assert exact_match(" 12\n", "12") == 1.0
    assert exact_match("1 2", "12") == exact_match("12.0", "12") == 0.0


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("scorer", [gsm8k, gsm8k_flexible])
def test_every_solution_of_gsm8k_is_right_and_with_another_number_it_is_wrong(
    split: str, scorer: Callable[[str, str], float]
) -> None:
    rows = gsm8k_rows(split)
    assert len(rows) in ({"train": 7_473, "test": 1_319}[split], {"train": 400, "test": 100}[split])
    for row in rows:
        solution, _, answer = row["answer"].rpartition("#### ")
        other = f"{solution}#### {int(answer.replace(',', '')) + 1}"
        assert scorer(row["answer"], row["answer"]) == scorer(row["answer"], answer) == 1.0, row
        assert scorer(other, row["answer"]) == scorer(other, answer) == 0.0, row


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("72", "72"),
        (" 72.", "72"),
        ("72.0", "72"),
        ("72", "72.00"),
        ("72", "72.0"),
        ("$1,250", "1250"),
        ("\\$1250", "1,250"),
        ("$ 1,250.50", "1250.5"),
        ("50%", "50"),
        ("50", "50%"),
        ("-5", "-5"),
        ("- 5", "-5"),
        ("−5", "-5"),
        ("-$5", "$-5"),
        ("+5", "5"),
        (".5", "0.50"),
        ("72 clips", "72"),
        ("72, as it should", "72"),
        ("72\nQuestion: what is 5+5?", "72"),
        ("72**", "72"),
        ("9" * 60 + "1", "9" * 60 + "1"),
        ("-" + "9" * 60, "-" + "9" * 60),
    ],
)
def test_numeric_answers_are_compared_by_value(answer: str, label: str) -> None:
    assert gsm8k(f"3 + 4 = 7\n#### {answer}", label) == 1.0
    assert gsm8k(f"#### 1\nno:\n####{answer}", f"so it is 8.\n#### {label}") == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "The answer is 72.",
        "### 72",
        "#### seventy-two",
        "#### ",
        "#### 72\n#### 71",
        "#### 72/3",
        "#### 72 / 3",
        "#### 72^2",
        "#### 72.5",
        "#### 72.1.2",
        "#### 72,5",
        "#### 7 2",
        "#### 72:30",
        "#### -72",
        "#### 720",
        "#### \\boxed{72}",
    ],
)
def test_strict_gsm8k_reads_the_number_after_the_last_separator(response: str) -> None:
    assert gsm8k(response, "72") == 0.0


def test_numbers_that_float_cannot_tell_apart_are_different() -> None:
    assert gsm8k(f"#### {'9' * 60}1", f"{'9' * 60}2") == gsm8k(f"#### -{'9' * 60}1", f"-{'9' * 60}2") == 0.0


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("First 5, then it is 72.", "72", 1.0),
        ("It is 72 of 100", "72", 0.0),
        ("10-3", "3", 1.0),
        ("(10)-3", "3", 1.0),
        ("10 - 3", "3", 1.0),
        ("it is -3", "-3", 1.0),
        ("it is -3", "3", 0.0),
        ("it is $-3", "-3", 1.0),
        ("it is -$3", "-3", 1.0),
        ("**$1,250.00**", "1250", 1.0),
        ("1,25", "25", 1.0),
        ("1,0000", "0", 1.0),
        ("about 50%.", "50", 1.0),
        ("\\boxed{72}", "72", 1.0),
        ("#### 72", "x\n#### 72", 1.0),
        ("nothing", "72", 0.0),
        ("", "0", 0.0),
    ],
)
def test_flexible_gsm8k_takes_the_last_number_anywhere(response: str, label: str, score: float) -> None:
    assert gsm8k_flexible(response, label) == score


@pytest.mark.parametrize("scorer", [gsm8k, gsm8k_flexible])
@pytest.mark.parametrize("label", ["", "seventy-two", "72 or 73", "work\n#### none"])
def test_a_label_without_a_number_is_an_error_and_not_a_score(scorer: Callable[[str, str], float], label: str) -> None:
    with pytest.raises(ValueError, match=says(repr(label), "#### N", "label_key")):
        scorer("#### 72", label)
    with pytest.raises(ValueError, match=says(repr(label))):
        scorer("no number either", label)


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("so it is $\\frac{2}{4}$.", "1/2"),
        ("so it is 0.5", "\\frac{1}{2}"),
        ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}"),
        ("\\boxed{(x+1)^2}", "x^2+2x+1"),
        ("\\boxed{5}, and not 7", "We find $x=3$, so the sum is \\boxed{5}."),
        ("The answer is 1,250.", "1250"),
        ("\\boxed{(1,2)}", "$(1, 2)$"),
        ("#### 72", "72"),
    ],
)
def test_math_compares_mathematics(response: str, label: str) -> None:
    assert math_answer(response, label) == 1.0


@pytest.mark.parametrize(
    ("response", "label"), [("\\boxed{7}, and not 5", "5"), ("no idea", "5"), ("", "5"), ("0.33", "\\frac{1}{3}")]
)
def test_math_scores_wrong_and_missing_answers_with_0(response: str, label: str) -> None:
    assert math_answer(response, label) == 0.0


def test_math_refuses_a_label_without_mathematics() -> None:
    with pytest.raises(ValueError, match=says("''", "label key")):
        math_answer("5", "")


@pytest.mark.parametrize(("name", "extra"), [("math", "math"), ("reasoning_gym", "tasks")])
def test_a_scorer_without_its_package_names_the_install_command(name: str, extra: str) -> None:
    # -S hides installed packages.
    code = f"from components.rewards.base import check_reward; check_reward('gsm8k'); check_reward({name!r})"
    result = subprocess.run(
        [sys.executable, "-SPc", code], capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(PROJECT)}
    )
    last = result.stderr.splitlines()[-1]
    assert re.search(says("ValueError", f"'{name}'", f"bash scripts/setup.sh recipes {extra}"), last), last


def test_math_works_in_any_thread() -> None:
    # math-verify implements time limits by signals, which only the main thread can set.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(math_answer, "\\boxed{\\frac{2}{4}}", "0.5").result() == 1.0


@pytest.mark.parametrize(
    ("source", "scorer"),
    [
        ("task:sort", "sort"),
        ("task:sort, task:sort", "sort"),
        ("reasoning_gym:chain_sum?min_terms=2", "reasoning_gym"),
        ("reasoning_gym:chain_sum,reasoning_gym:gcd", "reasoning_gym"),
        ("task:sort,reasoning_gym:gcd", None),
        ("task:sort,data.jsonl", None),
        ("data.jsonl", None),
        ("", None),
    ],
)
def test_the_scorer_is_inferred_from_data_with_a_single_one(source: str, scorer: str | None) -> None:
    assert default_scorer(source) == scorer


def test_a_long_run_of_spaces_is_parsed_quickly() -> None:
    for space in (" ", "\t", "\n", "\u2028"):
        assert get_scorer("gsm8k")(f"#### {space * 50_000}x", "1") == 0.0
        assert get_scorer("gsm8k")(f"#### {space * 50_000}$ {space * 50_000}-{space * 50_000}1", "-1") == 1.0
