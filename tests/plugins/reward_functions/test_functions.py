"""Reward functions for TRL, OpenRLHF and verl are called as by these libraries, according to the names of their
parameters.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from components.process.code_files import load_file
from components.rewards.base import Columns, check_reward
from components.rewards.errors import RewardError
from components.rewards.files import reward_function
from components.rewards.opening import open_reward
from plugins.reward_functions.functions import by_names
from tests.messages import says

RESPONSES = ["4", "5", "22"]
ROWS = [
    {"data_source": f"s{i}", "columns": {"solution": str(i + 4), "index": i}, "completion_ids": [7] * i, "step": 3}
    for i in range(3)
]


def called(function: Callable[..., Any], rows: list[dict[str, Any]] | None = None) -> Columns:
    """Return a function's rewards of RESPONSES to the prompts p0, p1 and p2 with labels 10, 11 and 12."""
    prompts = [f"p{i}" for i in range(3)]
    queries = [prompt + response for prompt, response in zip(prompts, RESPONSES)]
    return by_names(function)(queries, prompts, [10, 11, 12], RESPONSES, ROWS if rows is None else rows)


THEIRS = """
import torch

def trl_length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def trl_accuracy(prompts, completions, solution, **kwargs):
    return [1.0 if answer in completion else 0.0 for answer, completion in zip(solution, completions)]

def trl_ids(completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]

def trl_state(prompts, completions, trainer_state, **kwargs):
    assert sorted(kwargs) == ["completion_ids", "index", "log_extra", "log_metric", "solution"]
    return [trainer_state.global_step + index for index in kwargs["index"]]

async def trl_async(prompts, completions, **kwargs):
    return [2.0] * len(prompts)

def openrlhf_dict(queries, prompts, labels, **kwargs):
    assert sorted(kwargs) == ["index", "responses", "solution"]
    return {"rewards": torch.tensor(labels), "scores": torch.ones(3), "extra_logs": {"n": torch.tensor(labels)}}

def openrlhf_list(queries, prompts, labels):
    return [query.count(prompt) + label for query, prompt, label in zip(queries, prompts, labels)]

def openrlhf_renamed(q, p, golden):
    return torch.tensor(golden) + 0.5

def anything(*args, **kwargs):
    return [float(label) for label in args[2]]

def verl_one(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str) - ground_truth, "index": extra_info["index"], "pred": data_source}

def verl_all(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [info["index"] for info in extra_infos]
"""
"""Functions as in the documentation of TRL, OpenRLHF and verl, without type annotations."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Return the module with these functions."""
    path = tmp_path_factory.mktemp("theirs") / "theirs.py"
    path.write_text(THEIRS)
    return load_file(path)


@pytest.mark.parametrize(
    ("function", "rewards"),
    [
        ("trl_length", [1, 1, 2]),
        ("trl_accuracy", [1, 1, 0]),
        ("trl_ids", [0, 1, 2]),
        ("trl_state", [3, 4, 5]),
        ("trl_async", [2, 2, 2]),
        ("openrlhf_dict", [10, 11, 12]),
        ("openrlhf_list", [11, 12, 13]),
        ("openrlhf_renamed", [10.5, 11.5, 12.5]),
        ("anything", [10, 11, 12]),
        ("verl_one", [-6, -6, 10]),
        ("verl_all", [0, 1, 2]),
    ],
)
def test_each_function_gets_the_columns_named_by_its_parameters(
    theirs: ModuleType, function: str, rewards: list[float]
) -> None:
    assert called(getattr(theirs, function)).rewards == rewards


def test_numbers_and_texts_of_a_dict_and_of_trls_loggers_are_kept(theirs: ModuleType) -> None:
    actual = called(theirs.verl_one)
    assert (actual.logs, actual.texts) == ({"index": [0.0, 1.0, 2.0]}, {"pred": ["s0", "s1", "s2"]})

    def logging(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("mean_length", 4 / 3)
        log_extra("first", [completion[0] for completion in completions])
        return [0.0] * len(completions)

    actual = called(logging)
    assert (actual.logs, actual.texts) == ({"mean_length": [4 / 3] * 3}, {"first": ["4", "5", "2"]})


def test_trl_functions_get_chat_messages_as_messages_and_text_as_text() -> None:
    messages = [[{"role": "user", "content": f"p{i}"}] for i in range(3)]
    rows = [{"columns": {"prompt": turns}} for turns in messages]
    seen: list[Any] = []

    def of_trl(prompts: Any, completions: Any) -> list[float]:
        seen.extend([prompts, completions])
        return [1.0] * 3

    def of_ours(queries: Any, prompts: Any, labels: Any) -> list[float]:
        seen.append(prompts)
        return [1.0] * 3

    called(of_trl, rows)
    called(of_ours, rows)
    assert seen[0] == messages
    assert seen[1][2] == [{"role": "assistant", "content": "22"}]
    assert seen[2] == ["p0", "p1", "p2"]


def test_trl_functions_get_a_prefilled_message_with_its_beginning() -> None:
    request = {"role": "user", "content": "p"}
    begun = {"role": "assistant", "content": "It is "}
    rows = [{"columns": {"prompt": turns}} for turns in ([request, begun], [request], [request])]
    seen: list[Any] = []

    def of_trl(prompts: Any, completions: Any) -> list[float]:
        seen.extend([prompts, completions])
        return [1.0] * 3

    called(of_trl, rows)
    assert seen[0] == [[request]] * 3
    assert [turns[0]["content"] for turns in seen[1]] == ["It is 4", "5", "22"]


def test_a_missing_column_is_named_together_with_the_existing_ones() -> None:
    def lost(completions: Any, answer: Any) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(TypeError, match=says("'answer'", "index", "solution")):
        called(lost)


def test_the_function_of_a_file_is_named_by_convention_or_in_the_path_or_is_the_only_one(tmp_path: Path) -> None:
    path = tmp_path / "style.py"
    path.write_text("def _helper(): ...\nasync def brevity(completions): return [0.0 for _ in completions]\n")
    assert reward_function(str(path)) == (path, "brevity")
    path.write_text(path.read_text() + "def compute_score(data_source, solution_str, ground_truth): return 1.0\n")
    assert reward_function(str(path)) == (path, "compute_score")
    assert reward_function(f"{path}:brevity") == (path, "brevity")
    with pytest.raises(ValueError, match=says("length", "brevity")):
        check_reward(f"{path}:length")
    with open_reward(f"2*{path}:brevity + 1*{path}") as reward:
        assert reward(["pa"], ["p"], [""]).reward_B.tolist() == [1.0]


def test_none_skips_a_part_and_fails_the_response_if_all_parts_are_none(tmp_path: Path) -> None:
    path = tmp_path / "parts.py"
    path.write_text(
        "def math(completions, kind, **kwargs):\n"
        "    return [1.0 if of == 'math' else None for of in kind]\n"
        "def code(completions, kind, **kwargs):\n"
        "    return [0.5 if of == 'code' else None for of in kind]\n"
    )
    count = 40
    kinds = ["math", "code"] * (count // 2 - 1) + ["math", "prose"]
    rows = [{"columns": {"kind": kind}} for kind in kinds]
    placeholders = ["p"] * count
    with open_reward(f"3*{path}:math + 1*{path}:code") as reward:
        output = reward(placeholders, placeholders, placeholders, responses=placeholders, rows=rows)
    # 3 * 1, and 1 * .5 alone. Their mean scores are 3 / 3 and .5 / 1. No part rewards the last response.
    assert output.reward_B.tolist() == [3.0, 0.5] * (count // 2 - 1) + [3.0, 0.0]
    assert output.score_B.tolist() == [1.0, 0.5] * (count // 2 - 1) + [1.0, 0.0]
    assert list(output.failures) == [count - 1]
    with open_reward(f"{path}:math") as reward, pytest.raises(RewardError, match=says("None", "math")):
        reward(placeholders, placeholders, placeholders, responses=placeholders, rows=rows)


def test_reward_functions_get_columns_besides_prompt_and_label(tmp_path: Path) -> None:
    from components.data.prompts import load_rows

    turns = [{"role": "user", "content": "1 + 1"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"chat": turns, "label": "2", "level": 3, "datasource": "sums"}))
    [row] = load_rows(str(tmp_path / "rows.jsonl"), "chat", "label")
    assert row["extra_info"] == {"prompt": turns, "level": 3}


def test_a_missing_column_of_a_row_is_none(tmp_path: Path) -> None:
    from components.data.prompts import load_rows

    lines = [{"input": "a", "solution": 1}, {"input": "b"}, {"input": "c", "level": "x"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = load_rows(str(tmp_path / "rows.jsonl"))
    assert [row["extra_info"] for row in rows] == [
        {"solution": 1, "level": None},
        {"solution": None, "level": None},
        {"solution": None, "level": "x"},
    ]


def test_each_row_of_mixed_prompts_is_passed_as_messages_or_text() -> None:
    turns = [{"role": "user", "content": "p0"}]
    rows = [{"columns": {"prompt": turns}}, {}, {}]
    seen: list[Any] = []

    def of_trl(prompts: Any, completions: Any) -> list[float]:
        seen.extend([prompts, completions])
        return [1.0] * 3

    called(of_trl, rows)
    assert seen == [[turns, "p1", "p2"], [[{"role": "assistant", "content": "4"}], "5", "22"]]
