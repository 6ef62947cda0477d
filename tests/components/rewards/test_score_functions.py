"""Reward functions in verl's signature: arguments, results, and selection by data source."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from components.rewards.base import RewardOutput, RewardSettings
from components.rewards.code import read_scores
from components.rewards.errors import RewardError
from components.rewards.score_functions import ScoreCode, default_functions, find_function
from components.rewards.workers import WorkerReward
from tests.messages import says


def scored(code: ScoreCode, sources: Sequence[str], responses: Sequence[str], **settings: Any) -> RewardOutput:
    """Return scores of responses to the prompts "p0", "p1", ... labels 0, 1, ... and extra_info {"i": label}."""
    labels = list(range(len(sources)))
    return ask(code, sources, responses, labels, [{"i": label} for label in labels], **settings)


def ask(
    code: ScoreCode,
    sources: Sequence[str],
    responses: Sequence[str],
    labels: Sequence[Any],
    extras: Sequence[Any],
    **settings: Any,
) -> RewardOutput:
    prompts = [f"p{i}" for i in range(len(sources))]
    queries = [prompt + response for prompt, response in zip(prompts, responses)]
    rows = [{"data_source": source, "columns": extra} for source, extra in zip(sources, extras)]
    with WorkerReward(code.reward_code(), RewardSettings(**settings)) as reward:
        return reward(queries, prompts, labels, responses=responses, rows=rows)


def file_of(folder: Path, text: str, **code: Any) -> ScoreCode:
    (folder / "score.py").write_text(f"import asyncio, os, time\n{text}")
    return ScoreCode(path=str(folder / "score.py"), **code)


def test_a_function_gets_one_response_and_its_configured_arguments_by_name(tmp_path: Path) -> None:
    body = (
        "def rate(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n"
        "    assert extra_info == {'i': ground_truth}\n"
        "    return len(data_source) + 10 * len(solution_str) + bonus * ground_truth\n"
    )
    code = file_of(tmp_path, body, name="rate", kwargs={"bonus": 100})
    assert scored(code, ["a", "bb"], ["", "xyz"]).reward_B.tolist() == [1.0, 132.0]


def test_a_function_may_be_async(tmp_path: Path) -> None:
    body = (
        "async def compute_score(solution_str, **others):\n    await asyncio.sleep(0)\n    return solution_str == 'a'\n"
    )
    code = file_of(tmp_path, body)
    code.check()
    assert scored(code, ["s", "s"], ["a", "b"]).reward_B.tolist() == [1.0, 0.0]


def test_numbers_next_to_the_score_are_logged_and_texts_are_kept(tmp_path: Path) -> None:
    body = (
        "def compute_score(solution_str, **others):\n"
        "    if solution_str == 'plain': return 2\n"
        "    return {'score': -1.0, 'acc': True, 'pred': 72, 'why': solution_str}\n"
    )
    output = scored(file_of(tmp_path, body), ["s"] * 3, ["a", "plain", "b"])
    assert output.reward_B.tolist() == output.score_B.tolist() == [-1.0, 2.0, -1.0]
    # A response without accuracy is not counted as 0, which would lower the mean.
    assert [math.isnan(value) for value in output.logs["acc"].tolist()] == [False, True, False]
    assert output.logs["acc"][0] == 1.0
    # A prediction is text even if it looks like a number: 72 and "72.0" are different.
    assert output.texts == {"pred": ["72", None, "72"], "why": ["a", None, "b"]}
    assert list(output.logs) == ["acc"]


def test_a_batch_function_gets_all_responses_in_one_call_as_lists(tmp_path: Path) -> None:
    body = (
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, base=0):\n"
        "    assert extra_infos == [{'i': label} for label in ground_truths]\n"
        "    longest = max(map(len, solution_strs))\n"
        "    return [{'score': base + len(text) / longest, 'n': len(data_sources)} for text in solution_strs]\n"
    )
    answers = ["x" * (i + 1) for i in range(100)]
    output = scored(file_of(tmp_path, body, lists=True, kwargs={"base": 1}), ["s"] * 100, answers, workers=2)
    assert output.reward_B.tolist() == pytest.approx([1 + (i + 1) / 100 for i in range(100)])
    assert set(output.logs["n"].tolist()) == {100.0}


def test_failed_responses_have_nan_in_the_logs(tmp_path: Path) -> None:
    body = (
        "def compute_score(solution_str, **others):\n"
        "    if solution_str == 'die': os._exit(3)\n"
        "    return {'score': 1.0, 'acc': 1.0}\n"
    )
    answers = ["a"] * 10
    answers[3], answers[7] = "die", "die"
    output = scored(file_of(tmp_path, body), ["s"] * 10, answers, max_failed_share=0.2)
    assert output.reward_B.tolist() == [float(answer == "a") for answer in answers]
    assert list(output.failures) == [3, 7]
    assert re.search(says("exit code 3", "response 7", "'p7'"), output.failures[7])
    assert output.logs["acc"].isnan().tolist() == [answer != "a" for answer in answers]


def test_hanging_responses_have_separate_deadlines_and_a_batch_has_the_sum_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = "def compute_score(**columns):\n    while True: time.sleep(1)\n"
    for lists, said in ((False, []), (True, ["0.4 s"])):
        caplog.clear()
        code = file_of(tmp_path, body, lists=lists)
        output = scored(code, ["s"] * 2, ["a"] * 2, timeout_s=0.2, max_failed_share=1.0)
        assert list(output.failures) == [0, 1]
        assert re.search(says("0.2 s", "response 1", "'p1'"), output.failures[1])
        # Both responses in one call first, which is reported, and then each one alone.
        assert len(caplog.records) == len(said)
        for fact, record in zip(said, caplog.records):
            assert fact in record.getMessage()


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ("return {'acc': 1}", ["['acc']", "'score'"]),
        ("return float('nan')", ["'rewards'", "nan"]),
    ],
)
def test_a_wrong_result_of_a_function_is_described_in_the_error(tmp_path: Path, body: str, facts: list[str]) -> None:
    code = file_of(tmp_path, f"def compute_score(**columns):\n    {body}\n")
    with pytest.raises(RewardError, match=says("compute_score", tmp_path / "score.py", "1 of 1", *facts)):
        scored(code, ["s"], ["a"])


def test_a_batch_function_that_returns_too_few_rewards_raises_an_error(tmp_path: Path) -> None:
    code = file_of(tmp_path, "def compute_score(**columns):\n    return [1.0] * 2\n", lists=True)
    with pytest.raises(RewardError, match=says("2 rewards", "3 responses")):
        scored(code, ["s"] * 3, ["a"] * 3)


def test_a_reward_file_is_checked_without_running_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says("score.py:score", "asyncio, compute, os, time")):
        file_of(tmp_path, "def compute(): pass\nraise SystemExit", name="score").check()
    with pytest.raises(ValueError, match=says("'nowhere.py'")):
        ScoreCode(path="nowhere.py").check()


def test_the_data_source_selects_the_function() -> None:
    answers = {
        "openai/gsm8k": ("#### 7", "so 7"),
        "gsm8k_flexible": ("so 7", "so 8"),
        "lighteval/MATH": (r"\boxed{\frac{14}{2}}", r"\boxed{8}"),
        "aime2024": (r"\boxed{7}", ""),
        "exact_match": ("7", "8"),
    }
    sources = [source for source in answers for _ in range(2)]
    responses = [response for pair in answers.values() for response in pair]
    output = ask(ScoreCode(), sources, responses, [7] * len(sources), [{}] * len(sources))
    assert output.reward_B.tolist() == [1.0, 0.0] * len(answers)
    assert output.failures == {}


def test_a_task_is_a_data_source_and_logs_the_format_of_responses() -> None:
    output = ask(ScoreCode(), ["word", "sort"], ["#### 9", "ab"], ["7+5=12 12-3=9 #### 9", "ab"], [{}] * 2)
    assert output.score_B.tolist() == [1.0, 1.0]
    assert (output.logs["marks"][0], output.logs["reasons"][0]) == (1.0, 0.0)
    assert output.logs["marks"].isnan().tolist() == [False, True]


def twice(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Mapping[str, Any]:
    return {"score": 2 * float(ground_truth), "acc": torch.tensor(0.5).numpy()}


def test_functions_can_be_registered_by_name_or_prefix() -> None:
    functions = default_functions() | {"mine/*": twice, "mine/special": default_functions()["exact_match"]}
    assert find_function(functions, "mine/any") is twice
    assert find_function(functions, "yours/any") is None
    code = ScoreCode(functions=functions)
    assert code.unknown(["mine/a", "yours", "openai/gsm8k", "yours", "reasoning_gym:chain_sum"]) == ["yours"]
    output = scored(code, ["mine/a", "mine/b", "mine/special"], ["", "", "2"])
    assert output.reward_B.tolist() == [0.0, 2.0, 1.0]
    assert output.logs["acc"].tolist()[:2] == [0.5, 0.5]
    with pytest.raises(ValueError, match=says("lambda", "module")):
        scored(ScoreCode(functions={"mine": lambda **columns: 0.0}), ["mine"], ["a"])


def test_an_unknown_data_source_fails_unless_the_function_is_optional() -> None:
    with pytest.raises(RewardError, match="'yours'"):
        scored(ScoreCode(), ["yours"], ["a"])
    assert scored(ScoreCode(optional=True), ["yours", "exact_match"], ["a", "1"]).score_B.tolist() == [0.0, 1.0]


def test_labels_are_checked_with_one_row_per_data_source() -> None:
    rows = [{"datasource": "sort", "label": "ab"}, {"datasource": "openai/gsm8k", "label": "seven"}]
    ScoreCode().check_labels(rows[:1])
    with pytest.raises(ValueError, match=says("'openai/gsm8k'", "'seven'")):
        ScoreCode().check_labels(rows)
    ScoreCode(path="mine.py").check_labels(rows)


def test_scores_may_come_from_torch_and_numpy() -> None:
    actual = read_scores([torch.tensor(1.5), {"score": torch.tensor([2.0]), "x": torch.tensor(3), "y": None}])
    assert actual.rewards == [1.5, 2.0]
    assert actual.logs["x"][1] == 3.0
    assert "y" not in {**actual.logs, **actual.texts}
