"""Tasks of reasoning-gym: drawing of questions, and scores of their verifiers.

Tests that need the package import it themselves, because the default tier runs without it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.data.prompts import load_rows
from components.rewards.base import RewardSettings
from components.rewards.opening import open_reward
from plugins.reasoning_gym.rows import REFUSED, draw_rows, parse_task
from plugins.reasoning_gym.scorer import make_label, reasoning_gym_score
from tests.messages import says

PROJECT = Path(__file__).resolve().parents[3]

NO_STORED_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks with many correct answers and none in their labels, so that only garbage can be tested."""
EASIER: dict[str, dict[str, Any]] = {
    # Only puzzles without a solution: the verifier searches for one, which takes up to 20 s if it exists.
    "knight_swap": {"impossible_ratio": 1.0},
}
"""Settings for tasks that take too long per question with their defaults."""

SMALL = "chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def label_of(answer: str | None, task: str = "chain_sum", **metadata: Any) -> str:
    return make_label(task, {}, {"question": "", "answer": answer, "metadata": metadata})


def inputs(rows: list[dict[str, Any]]) -> set[str]:
    return {row["input"] for row in rows}


def check_task(task: str) -> None:
    """Check that a correct answer to a question of this task scores 1, and garbage 0."""
    import reasoning_gym

    settings = EASIER.get(task, {})
    entry = reasoning_gym.create_dataset(task, seed=5, size=1, **settings)[0]
    label = make_label(task, settings, entry)
    assert reasoning_gym_score("I would say <answer>zzz</answer>", label)["score"] == 0.0, task
    assert (entry["answer"] is None) == (task in NO_STORED_ANSWER), task
    if entry["answer"] is not None:
        tagged = f"<answer>no</answer> or <answer>\n{entry['answer']}\n</answer>."
        assert reasoning_gym_score(tagged, label)["score"] == 1.0, task
        assert reasoning_gym_score(f"{entry['answer']}\n", label)["score"] == 1.0, task
        assert reasoning_gym_score(entry["answer"], label)["reasoning_gym_error"] == 0.0, task


@pytest.mark.full
@pytest.mark.parametrize("task", ["chain_sum", "rotate_matrix"])
def test_a_correct_answer_scores_1_and_garbage_scores_0(task: str) -> None:
    check_task(task)


@pytest.mark.nightly
def test_correct_answers_score_1_and_garbage_scores_0_in_every_task() -> None:
    from reasoning_gym.factory import DATASETS

    tasks = set(DATASETS) - set(REFUSED)
    assert len(tasks) > 100
    for task in sorted(tasks):
        check_task(task)


@pytest.mark.nightly
def test_tasks_without_a_stored_answer_can_be_solved() -> None:
    import reasoning_gym

    def stored(task: str, key: str) -> tuple[Any, str]:
        entry = reasoning_gym.create_dataset(task, seed=5, size=1)[0]
        return entry["metadata"][key], make_label(task, {}, entry)

    colours, label = stored("graph_color", "possible_answer")
    assert reasoning_gym_score(json.dumps(colours, indent=1), label)["score"] == 1.0
    assert reasoning_gym_score(json.dumps(dict.fromkeys(colours, 1)), label)["score"] == 0.0
    for task, key in (("propositional_logic", "example_answer"), ("rubiks_cube", "example_correct_answer")):
        assert reasoning_gym_score(*stored(task, key))["score"] == 1.0


@pytest.mark.full
@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("12", 1.0),
        (" 12 \n", 1.0),
        ("7 + 5 makes\n12\n\n", 1.0),
        ("<answer>12</answer>", 1.0),
        ("<answer> 12\n</answer> as 7 + 5 = 13", 1.0),
        ("the tag <answer> is for <answer>12</answer>", 1.0),
        ("<answer>12</answer> no: <answer>13</answer>", 0.0),
        ("12\nis it", 0.0),
        # The verifier gives 2/9 of the score for this.
        ("it is: 12", 0.0),
        ("12 or 13", 0.0),
        ("<answer></answer>12", 0.0),
        ("", 0.0),
        (" \n", 0.0),
    ],
)
def test_the_answer_is_read_from_tags_or_from_the_last_line(response: str, score: float) -> None:
    assert reasoning_gym_score(response, label_of("12"))["score"] == score


@pytest.mark.full
def test_an_answer_of_several_lines_is_the_whole_response() -> None:
    label = label_of("1 0\n0 1", "rotate_matrix")
    assert reasoning_gym_score("1 0\n0 1\n", label)["score"] == 1.0
    assert reasoning_gym_score("0 1", label)["score"] == 0.0
    assert reasoning_gym_score("so:\n1 0\n0 1", label)["score"] == 0.0
    assert reasoning_gym_score("so: <answer>\n1 0\n0 1</answer>", label)["score"] == 1.0


@pytest.mark.full
def test_an_answer_that_breaks_its_verifier_scores_0_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    label = label_of(None, "boxnet", initial_state={"0.5_0.5": ["box_red", "target_red"]})
    for response in ("0", "<answer>7</answer>", "[[]]"):
        assert reasoning_gym_score(response, label)["score"] == 0.0
        assert reasoning_gym_score(response, label)["reasoning_gym_error"] == 1.0
    right = '[{"Agent[0.5, 0.5]": "move(box_red, target_red)"}]'
    assert reasoning_gym_score(right, label) == {"score": 1.0, "reasoning_gym_error": 0.0}
    assert len(caplog.records) == 2
    for record, error in zip(
        caplog.records,
        ("TypeError: 'int' object is not iterable", "AttributeError: 'list' object has no attribute 'items'"),
    ):
        assert re.search(says("reasoning_gym:boxnet", error), record.getMessage())


@pytest.mark.parametrize(
    "answer",
    [
        "open('/tmp/x','w')",
        "exec(chr(49))",
        "().__class__",
        "[print]",
        "ｅｘｉｔ()",
        "exit()",
        "(lambda: 6)()",
        "breakpoint",
    ],
)
def test_code_does_not_reach_a_verifier_that_would_run_it(answer: str) -> None:
    label = label_of("2*3", "countdown", numbers=[2, 3], target=6)
    assert reasoning_gym_score(answer, label)["score"] == 0.0
    assert reasoning_gym_score(answer, label)["reasoning_gym_error"] == 1.0


@pytest.mark.full
def test_a_formula_reaches_the_verifier_that_runs_it() -> None:
    label = label_of("2*3", "countdown", numbers=[2, 3], target=6)
    assert reasoning_gym_score("max(2,3)*min(2,3)*(2-2)", label)["score"] == 0.0
    assert reasoning_gym_score("3*2", label)["score"] == 1.0
    assert reasoning_gym_score("3*2", label)["reasoning_gym_error"] == 0.0


def test_a_label_keeps_tuples_and_keys_that_are_not_strings() -> None:
    label = make_label("arc_agi", {}, {"question": "", "answer": "0 1", "metadata": {"output": ((0, 1),)}})
    assert json.loads(label)["entry"]["metadata"] == {"output": {"(tuple)": [{"(tuple)": [0, 1]}]}}
    assert '[[{"(tuple)": [1, 2]}, "a"], [3, "b"]]' in make_label("ab", {}, {"metadata": {(1, 2): "a", 3: "b"}})


@pytest.mark.full
def test_a_verifier_gets_the_tuples_of_its_question() -> None:
    # The verifier compares grids of tuples. Grids of lists would differ.
    entry = {"question": "", "answer": "0 1", "metadata": {"output": ((0, 1),)}}
    assert reasoning_gym_score("0 1", make_label("arc_agi", {}, entry))["score"] == 1.0


@pytest.mark.parametrize("label", ["", "12", "[]", '{"task": "chain_sum"}', "None"])
def test_a_foreign_label_raises_an_error(label: str) -> None:
    with pytest.raises(ValueError, match=says(repr(label), "reasoning_gym:<task>")):
        reasoning_gym_score("12", label)


@pytest.mark.full
def test_the_splits_share_no_question_whatever_the_seed() -> None:
    train = draw_rows(SMALL, "train", 150, seed=1)
    heldout = load_rows(f"reasoning_gym:{SMALL}", heldout=True, max_rows=12, seed=2)
    assert (len(inputs(train)), len(inputs(heldout))) == (150, 12)
    assert not inputs(train) & inputs(heldout)
    for row in train:
        first, sign, second = re.findall(r"(?<=: )\d|[-+]|\d(?= =)", row["input"])
        right = int(first) + int(second) if sign == "+" else int(first) - int(second)
        assert reasoning_gym_score(str(right), row["label"])["score"] == 1.0
        assert row["datasource"] == "chain_sum"


@pytest.mark.full
def test_tasks_that_depend_on_set_order_draw_the_same_in_every_process() -> None:
    # A request for more rows begins with those of a smaller request.
    assert draw_rows("ransom_note", "train", 100, seed=0)[:20] == draw_rows("ransom_note", "train", 20, seed=0)


@pytest.mark.full
def test_a_request_for_too_many_questions_raises_an_error_with_their_number() -> None:
    with pytest.raises(ValueError, match=says(SMALL, 500, "train")) as caught:
        draw_rows(SMALL, "train", 500, seed=0)
    # There are 200 sums and differences of two digits.
    assert re.search(r"\b1\d\d\b", str(caught.value))
    with pytest.raises(ValueError, match=says("reasoning_gym:chain_sum", "9 different", "heldout", "0 s")):
        draw_rows("chain_sum", "heldout", 9, seed=0, limit_s=0.0)
    with pytest.raises(ValueError, match=says("reasoning_gym:chain_sum", "'test'", "'train'", "'heldout'")):
        load_rows("reasoning_gym:chain_sum", split="test")
    # The message of the library.
    with pytest.raises(ValueError, match=says("chain_sum?min_terms=9", "max_terms must be >= min_terms")):
        load_rows("reasoning_gym:chain_sum?min_terms=9")


@pytest.mark.full
@pytest.mark.parametrize("task", REFUSED)
def test_a_task_that_cannot_be_used_is_refused_with_the_reason(task: str) -> None:
    with pytest.raises(ValueError, match=says(REFUSED[task])):
        parse_task(task)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("chain_sun", ["chain_sum", "ab, acre, advanced"]),
        ("chain_sum?min_term=2", ["'min_term=2'", "min_terms", "allow_negation"]),
        ("chain_sum?seed=2", ["'seed=2'", "allow_negation"]),
        ("chain_sum?", ["''", "allow_negation"]),
        ("chain_sum?min_terms", ["'min_terms'", "allow_negation"]),
        ("chain_sum?min_terms=two", ["'min_terms=two'", "int", 2]),
        ("time_intervals?min_date=2000-01-01", ["'min_date=2000-01-01'", "date"]),
    ],
)
def test_an_unknown_task_or_setting_raises_an_error(name: str, facts: list[object]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        parse_task(name)


@pytest.mark.full
def test_settings_have_the_types_of_the_task() -> None:
    assert parse_task("chain_sum") == ("chain_sum", {})
    assert parse_task("basic_arithmetic?operators=+|-&allow_parentheses=False&max_terms=3")[1] == {
        "operators": ("+", "-"),
        "allow_parentheses": False,
        "max_terms": 3,
    }
    assert parse_task("calendar_arithmetic?tasks=weekday_offset|count_days")[1]["tasks"] == [
        "weekday_offset",
        "count_days",
    ]
    assert parse_task("simple_equations?operators_weights=0.5|0.25|0.25")[1] == {"operators_weights": [0.5, 0.25, 0.25]}


@pytest.mark.full
def test_a_plan_can_check_the_scorer_without_loading_the_library() -> None:
    code = (
        "import sys, components.rewards.scorers\n"
        "from components.rewards.base import check_reward\n"
        "check_reward('reasoning_gym')\n"
        "assert not {'reasoning_gym', 'torch', 'numpy'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert result.returncode == 0, result.stderr


@pytest.mark.full
def test_worker_processes_score_and_verifier_errors_do_not_stop_a_run() -> None:
    labels = [label_of("2 × 3", "prime_factorization", factors=[2, 3])] * 3 + [label_of("12")] * 3
    responses = ["3 × 2", "zzz", "2 x 3", "12", "zzz", "so <answer>12</answer>"]
    with open_reward("reasoning_gym", RewardSettings(max_failed_share=0.0)) as reward:
        output = reward([""] * 6, [""] * 6, labels, responses=responses)
    assert output.reward_B.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert output.logs["reasoning_gym_error"].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert not output.failures
