"""Tasks of reasoning-gym: what is drawn, and what their verifiers make of an answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from components.data.prompts import load_rows
from components.data.reasoning_gym_rows import REFUSED, draw_rows, parse_task
from components.data.reasoning_gym_scorer import make_label, reasoning_gym_score, reasoning_gym_style
from components.data.rewards import RewardSettings, open_reward

NO_STORED_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""There are many right answers, and the task names none: only garbage can be tried."""
EASIER: dict[str, dict[str, Any]] = {
    # Only puzzles without a solution: it searches for one, and takes up to 20 s where there has to be one.
    "knight_swap": {"impossible_ratio": 1.0},
}
"""Settings of tasks that take too long for a question by their own."""

SMALL = "chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"


def label_of(answer: str | None, task: str = "chain_sum", **metadata: Any) -> str:
    return make_label(task, {}, {"question": "", "answer": answer, "metadata": metadata})


def inputs(rows: list[dict[str, Any]]) -> set[str]:
    return {row["input"] for row in rows}


@pytest.mark.parametrize("task", sorted(set(DATASETS) - set(REFUSED)))
def test_the_right_answer_scores_1_and_garbage_0(task: str) -> None:
    settings = EASIER.get(task, {})
    entry = reasoning_gym.create_dataset(task, seed=5, size=1, **settings)[0]
    label = make_label(task, settings, entry)
    assert reasoning_gym_score("I would say <answer>zzz</answer>", label) == 0.0
    assert (entry["answer"] is None) == (task in NO_STORED_ANSWER)
    if entry["answer"] is not None:
        assert reasoning_gym_score(f"<answer>no</answer> or <answer>\n{entry['answer']}\n</answer>.", label) == 1.0
        assert reasoning_gym_score(f"{entry['answer']}\n", label) == 1.0
        assert reasoning_gym_style(entry["answer"], label) == {"reasoning_gym_error": 0.0}


def test_tasks_without_a_stored_answer_can_be_solved() -> None:
    def stored(task: str, key: str) -> tuple[Any, str]:
        entry = reasoning_gym.create_dataset(task, seed=5, size=1)[0]
        return entry["metadata"][key], make_label(task, {}, entry)

    colours, label = stored("graph_color", "possible_answer")
    assert reasoning_gym_score(json.dumps(colours, indent=1), label) == 1.0
    assert reasoning_gym_score(json.dumps(dict.fromkeys(colours, 1)), label) == 0.0
    for task, key in (("propositional_logic", "example_answer"), ("rubiks_cube", "example_correct_answer")):
        assert reasoning_gym_score(*stored(task, key)) == 1.0


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
def test_the_answer_stands_in_its_tags_or_on_the_last_line(response: str, score: float) -> None:
    assert reasoning_gym_score(response, label_of("12")) == score


def test_an_answer_of_several_lines_is_the_whole_response() -> None:
    label = label_of("1 0\n0 1", "rotate_matrix")
    assert reasoning_gym_score("1 0\n0 1\n", label) == 1.0
    assert reasoning_gym_score("0 1", label) == 0.0
    assert reasoning_gym_score("so:\n1 0\n0 1", label) == 0.0
    assert reasoning_gym_score("so: <answer>\n1 0\n0 1</answer>", label) == 1.0


def test_an_answer_that_its_verifier_cannot_take_scores_0_and_is_logged_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    label = label_of(None, "boxnet", initial_state={"0.5_0.5": ["box_red", "target_red"]})
    for response in ("0", "<answer>7</answer>", "[[]]"):
        assert reasoning_gym_score(response, label) == 0.0
        assert reasoning_gym_style(response, label) == {"reasoning_gym_error": 1.0}
    right = '[{"Agent[0.5, 0.5]": "move(box_red, target_red)"}]'
    assert (reasoning_gym_score(right, label), reasoning_gym_style(right, label)) == (1.0, {"reasoning_gym_error": 0.0})
    said = "reasoning_gym:boxnet: the verifier could not take an answer ({}); such answers get 0"
    assert [record.getMessage() for record in caplog.records] == [
        said.format("TypeError: 'int' object is not iterable"),
        said.format("AttributeError: 'list' object has no attribute 'items'"),
    ]


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
    assert reasoning_gym_score(answer, label) == 0.0
    assert reasoning_gym_style(answer, label) == {"reasoning_gym_error": 1.0}
    assert reasoning_gym_score("max(2,3)*min(2,3)*(2-2)", label) == 0.0
    assert reasoning_gym_style("3*2", label) == {"reasoning_gym_error": 0.0}


def test_a_label_brings_back_tuples_and_keys_that_are_no_text() -> None:
    # The verifier compares grids of tuples; lists would be another grid to it.
    entry = {"question": "", "answer": "0 1", "metadata": {"output": ((0, 1),)}}
    label = make_label("arc_agi", {}, entry)
    assert reasoning_gym_score("0 1", label) == 1.0
    assert json.loads(label)["entry"]["metadata"] == {"output": {"(tuple)": [{"(tuple)": [0, 1]}]}}
    assert '[[{"(tuple)": [1, 2]}, "a"], [3, "b"]]' in make_label("ab", {}, {"metadata": {(1, 2): "a", 3: "b"}})


@pytest.mark.parametrize("label", ["", "12", "[]", '{"task": "chain_sum"}', "None"])
def test_another_label_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=r"is none of reasoning-gym's; score prompts of reasoning_gym:<task>"):
        reasoning_gym_score("12", label)


def test_the_splits_share_no_question_whatever_the_seed() -> None:
    train = draw_rows(SMALL, "train", 150, seed=1)
    heldout = load_rows(f"reasoning_gym:{SMALL}", heldout=True, max_rows=12, seed=2)
    assert (len(inputs(train)), len(inputs(heldout))) == (150, 12)
    assert not inputs(train) & inputs(heldout)
    for row in train:
        first, sign, second = re.findall(r"(?<=: )\d|[-+]|\d(?= =)", row["input"])
        right = int(first) + int(second) if sign == "+" else int(first) - int(second)
        assert reasoning_gym_score(str(right), row["label"]) == 1.0
        assert row["datasource"] == "chain_sum"


def test_what_follows_the_order_of_sets_is_drawn_the_same_in_every_process() -> None:
    # A longer request begins as a shorter one does.
    assert draw_rows("ransom_note", "train", 100, seed=0)[:20] == draw_rows("ransom_note", "train", 20, seed=0)


def test_a_request_that_cannot_be_met_says_what_was_found() -> None:
    with pytest.raises(
        ValueError, match=r"min_digits=1.*: 500 different train questions were asked .* and 1\d\d found;"
    ):
        draw_rows(SMALL, "train", 500, seed=0)
    with pytest.raises(
        ValueError, match=r"chain_sum: 9 different heldout questions .* found in 0 s; ask for fewer, or"
    ):
        draw_rows("chain_sum", "heldout", 9, seed=0, limit_s=0.0)
    with pytest.raises(ValueError, match=r"reasoning_gym:chain_sum has no split 'test'; set split to 'train' or"):
        load_rows("reasoning_gym:chain_sum", split="test")
    with pytest.raises(
        ValueError, match=r"cannot be drawn \(AssertionError: max_terms must be >= min_terms\); set other"
    ):
        load_rows("reasoning_gym:chain_sum?min_terms=9")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chain_sun", r"there is no such task \(did you mean chain_sum or .*\); there are ab, acre, advanced"),
        ("composite", "cannot be used: it mixes other tasks; name those"),
        ("game_of_life_halting", "cannot be used: its verifier takes any text for a right answer"),
        ("chain_sum?min_term=2", r"'min_term=2' sets nothing \(did you mean min_terms or .*\); settings are allow_neg"),
        ("chain_sum?seed=2", "'seed=2' sets nothing; settings are"),
        ("chain_sum?", "'' sets nothing; settings are"),
        ("chain_sum?min_terms", "'min_terms' sets nothing"),
        ("chain_sum?min_terms=two", "'min_terms=two' cannot be set: it must be of the type int, as 2 is"),
        ("time_intervals?min_date=2000-01-01", "'min_date=2000-01-01' cannot be set: it must be of the type date"),
    ],
)
def test_a_name_that_is_not_understood_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_task(name)


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


def test_worker_processes_score_and_answers_that_verifiers_cannot_take_do_not_stop_a_run() -> None:
    labels = [label_of("2 × 3", "prime_factorization", factors=[2, 3])] * 3 + [label_of("12")] * 3
    responses = ["3 × 2", "zzz", "2 x 3", "12", "zzz", "so <answer>12</answer>"]
    with open_reward("reasoning_gym", RewardSettings(max_failed_share=0.0)) as reward:
        output = reward([""] * 6, [""] * 6, labels, responses=responses)
    assert output.reward_B.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert output.logs["reasoning_gym_error"].tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert not output.failures
