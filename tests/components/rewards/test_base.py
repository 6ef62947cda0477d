"""Rewards by name, from a file or from servers: specifications that are rejected, and results of functions."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from components.rewards.base import RewardSettings, RewardSource, check_reward, read_columns
from components.rewards.opening import open_reward
from plugins.remote_reward.scorer import RemoteReward
from tests.messages import says

PROJECT = Path(__file__).resolve().parents[3]
QUERIES = ["ba>ab", "dc>dc"]
PROMPTS = ["ba>", "dc>"]
LABELS = ["ab", "cd"]


def reward_file(folder: Path, body: str) -> str:
    path = folder / "reward.py"
    path.write_text(body)
    return str(path)


@pytest.fixture(scope="module")
def sort_reward() -> Iterator[RewardSource]:
    with open_reward("sort") as reward:
        yield reward


def test_the_scorer_of_a_task_gets_the_text_after_the_prompt(sort_reward: RewardSource) -> None:
    output = sort_reward(QUERIES, PROMPTS, LABELS)
    assert output.reward_B.tolist() == output.score_B.tolist() == [1.0, 0.0]
    assert output.reward_B.dtype == torch.float32
    assert output.logs == output.failures == {}


def test_separately_passed_responses_are_scored_for_any_query() -> None:
    with open_reward("exact_match") as reward:
        # The label is a number, as in some data. A scorer gets its text.
        assert reward(["<s>q</s>"], ["q"], [12], responses=[" 12\n"]).reward_B.tolist() == [1.0]
        with pytest.raises(ValueError, match=says("'<s>q'", "'q'", "responses=")):
            reward(["<s>q"], ["q"], [12])


def test_columns_of_different_lengths_are_refused_and_an_empty_batch_is_none(sort_reward: RewardSource) -> None:
    with pytest.raises(ValueError, match=says("2 queries", "1 labels")):
        sort_reward(QUERIES, PROMPTS, ["ab"])
    with pytest.raises(ValueError, match=says("2 queries", "3 responses")):
        sort_reward(QUERIES, PROMPTS, LABELS, responses=["a"] * 3)
    assert sort_reward([], [], []).reward_B.shape == (0,)


def test_a_reward_that_cannot_be_opened_raises_an_error_without_running_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says("'sorted'", "exact_match", "gsm8k", "sort,", ".py")):
        check_reward("sorted")
    with pytest.raises(ValueError, match=says(tmp_path / "nothing.py")):
        check_reward(str(tmp_path / "nothing.py"))
    with pytest.raises(ValueError, match=says("reward.py", "reward_func(", "score")):
        check_reward(reward_file(tmp_path, "raise SystemExit\ndef score(): ...\ndef other(): ...\n"))
    for body in ("def reward_func(:\n", "def reward_func(): ...\n\0"):
        with pytest.raises(ValueError, match=says("reward.py", "Python")):
            check_reward(reward_file(tmp_path, body))
    check_reward(reward_file(tmp_path, "raise SystemExit\nfrom math import sqrt as reward_func\n"))


@pytest.mark.parametrize(
    "spec",
    [
        "http://",
        "http:///score",
        "ftp://a/score",
        "http://a:port/",
        "http://a:99999/",
        "http://a b/",
        "http://[::1",
        "http://a,",
        "http://a,sort",
        "reward.py,http://a",
    ],
)
def test_a_list_with_incomplete_urls_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=says(f"'{spec}'", "URL", "http://HOST:PORT/PATH")):
        check_reward(spec)


def test_urls_are_opened_without_a_request_to_the_servers() -> None:
    spec = "http://127.0.0.1:9/score, https://[::1]:9"
    check_reward(spec)
    with open_reward(spec) as reward:
        assert isinstance(reward, RemoteReward)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 0),
        ("url_tries", 0),
        ("url_batch_size", -1),
        ("timeout_s", 0.0),
        ("url_timeout_s", float("nan")),
        ("max_failed_share", 1.5),
    ],
)
def test_settings_that_cannot_work_raise_an_error(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=says(f"{name}={value}")):
        RewardSettings(**settings)


def test_a_plan_can_check_rewards_in_a_process_without_libraries() -> None:
    code = (
        "import sys, components.rewards.scorers\n"
        "from components.rewards.base import check_reward\n"
        "for spec in ('sort', 'gsm8k', 'math', 'http://a/b', '.5*sort + 1*math'): check_reward(spec)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'httpx', 'pyarrow', 'numpy', 'math_verify', 'reasoning_gym'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=PROJECT)
    assert result.returncode == 0, result.stderr


def test_rewards_may_be_tensors_arrays_lists_or_plain_numbers() -> None:
    actual = read_columns(
        {
            "rewards": torch.tensor([[1.5], [2.0]], requires_grad=True),
            "scores": [torch.tensor(1.0), torch.tensor([0.5]).numpy()],
            "extra_logs": {"each": (1, True), "one": 3, "wrapped": torch.tensor([[4.0]]), "nan": [1, float("nan")]},
        },
        2,
    )
    assert (actual.rewards, actual.scores) == ([1.5, 2.0], [1.0, 0.5])
    assert actual.logs.pop("nan")[0] == 1.0
    assert actual.logs == {"each": [1.0, 1.0], "one": [3.0, 3.0], "wrapped": [4.0, 4.0]}
    assert read_columns({"rewards": (1, 2), "extra_logs": None}, 2).scores == [1.0, 2.0]


@pytest.mark.parametrize(
    ("result", "facts"),
    [
        ([1.0, 2.0], ["list", "dict", "'rewards'"]),
        ({"reward": [1.0, 2.0]}, ["['reward']", "'rewards'"]),
        ({"rewards": [1.0]}, ["'rewards'", "(1,)", "2 queries"]),
        ({"rewards": 1.0}, ["'rewards'", "()", "2 queries"]),
        ({"rewards": []}, ["'rewards'", "(0,)", "2 queries"]),
        ({"rewards": torch.ones(1, 2)}, ["'rewards'", "(1, 2)", "2 queries"]),
        ({"rewards": [[1.0, 2.0], [3.0, 4.0]]}, ["'rewards'", "(2, 2)", "2 queries"]),
        ({"rewards": ["1", "2"]}, ["'rewards'", "str"]),
        ({"rewards": "12"}, ["'rewards'", "str"]),
        ({"rewards": [1.0, None]}, ["'rewards'", "NoneType"]),
        ({"rewards": [1.0, float("nan")]}, ["'rewards'", "nan"]),
        ({"rewards": [1.0, 1e39]}, ["'rewards'", "1e+39"]),
        ({"rewards": [1.0, 10**400]}, ["'rewards'", "inf"]),
        ({"rewards": [1.0, 1.0], "scores": [1.0, float("-inf")]}, ["'scores'", "-inf"]),
        ({"rewards": [1.0, 1.0], "scores": [1.0]}, ["'scores'", "(1,)"]),
        ({"rewards": [1.0, 1.0], "extra_logs": {"x": [1, 2, 3]}}, ["extra_logs['x']", "(3,)"]),
        ({"rewards": [1.0, 1.0], "extra_logs": {"x": "high"}}, ["extra_logs['x']", "str"]),
        ({"rewards": [1.0, 1.0], "extra_logs": [1.0]}, ["'extra_logs'", "list", "dict"]),
    ],
)
def test_a_wrong_result_is_described_in_the_error(result: Any, facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        read_columns(result, 2)
