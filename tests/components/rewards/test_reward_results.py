"""Results of reward functions: accepted forms, errors with both lengths, and concurrent async functions."""

import asyncio
import math
import re
import time
from collections import deque
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.rewards.base import RewardOutput, RewardSettings, read_columns
from components.rewards.errors import RewardError, WrongCountError
from components.rewards.opening import open_reward
from components.rewards.workers import WorkerReward
from plugins.reward_functions.functions import by_names, read_rewards
from tests.messages import says


def opened(folder: Path, body: str, count: int, **settings: Any) -> RewardOutput:
    """Return the rewards of the responses "0", "1", ... by the function of a file."""
    (folder / "own.py").write_text(body)
    texts = list(map(str, range(count)))
    with open_reward(str(folder / "own.py"), RewardSettings(**settings)) as reward:
        return reward(texts, [""] * count, texts)


@pytest.mark.parametrize(
    "result",
    [
        [1, 2.5],
        (1, 2.5),
        [[1], [2.5]],
        deque([1, 2.5]),
        np.array([1, 2.5]),
        np.array([[1], [2.5]], dtype=np.float16),
        torch.tensor([1, 2.5], dtype=torch.bfloat16),
        torch.tensor([[1], [2.5]], requires_grad=True),
        [torch.tensor(1), np.float32(2.5)],
        [Fraction(1), 2.5],
        [{"score": 1}, {"score": 2.5, "n": 3}],
        {"rewards": torch.tensor([1, 2.5])},
    ],
    ids=repr,
)
def test_numbers_in_every_kind_of_list_are_read(result: Any) -> None:
    assert read_rewards(result, 2).rewards == [1.0, 2.5]


def test_a_bool_is_a_number_and_none_means_no_reward() -> None:
    assert read_rewards([True, np.bool_(False)], 2).rewards == [1.0, 0.0]
    assert read_rewards([1.0, None], 2).absent == [1]
    assert read_rewards([{"score": 1}, None], 2).absent == [1]
    assert read_rewards([{"score": None}, {"score": 1}], 2).absent == [0]


@pytest.mark.parametrize("result", [[0.5], [0.5] * 3, np.array([0.5]), torch.ones(1), [None], [{"score": 1}]], ids=repr)
def test_a_wrong_number_of_rewards_raises_an_error_with_both_lengths(result: Any) -> None:
    with pytest.raises(WrongCountError, match=says(f"{len(result)} rewards", "2 responses")):
        read_rewards(result, 2)


@pytest.mark.parametrize(
    ("result", "facts"),
    [
        (None, ["NoneType"]),
        (1.0, ["float"]),
        (np.float64(1.0), ["float"]),
        (torch.tensor(1.0), ["float"]),
        ("12", ["str"]),
        (b"12", ["bytes"]),
        ({1.0, 2.0}, ["set"]),
        pytest.param((x for x in [1.0, 2.0]), ["generator"], id="generator"),
        ({"score": [1.0, 2.0]}, ["dict", "score"]),
        (["1", "2"], ["str"]),
        ([math.nan, 1.0], ["nan"]),
        ([1.0, math.inf], ["inf"]),
        ([10**400, 1], ["inf"]),
        ([[1, 2], [3, 4]], ["(2, 2)", "2 queries"]),
        ([{"score": 1}, {"reward": 1}], ["'score'", "reward"]),
        ([1j, 1.0], ["complex"]),
    ],
    ids=repr,
)
def test_an_invalid_reward_is_shown_in_the_error(result: Any, facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        read_rewards(result, 2)


def test_lists_nested_hundreds_deep_are_refused() -> None:
    nested: Any = 1.0
    for _ in range(900):
        nested = [nested]
    for columns in (
        {"rewards": nested},
        {"rewards": [1.0], "scores": nested},
        {"rewards": [1], "extra_logs": {"x": nested}},
    ):
        with pytest.raises(ValueError, match="nested"):
            read_columns(columns, 1)


@pytest.mark.parametrize("returned", ["[0.5]", "{'rewards': [0.5]}", "[0.5] * (len(queries) + 1)"])
def test_one_value_for_many_responses_ends_the_batch_without_single_calls(returned: str, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    body = (
        "def reward_func(queries, prompts, labels):\n"
        f"    open({str(calls)!r}, 'a').write(f'{{len(queries)}} ')\n"
        f"    return {returned}\n"
    )
    with pytest.raises(RewardError, match=says("own.py", "2")):
        opened(tmp_path, body, 8)
    assert set(calls.read_text().split()) == {"2"}


# Async functions for one response.

SLOW = """
import asyncio
running = most = 0

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep({sleep})
    running -= 1
    {body}
    return {{"score": float(ground_truth), "most": most}}
"""


def test_an_async_function_of_one_response_is_awaited_for_all_of_them_together(tmp_path: Path) -> None:
    output = opened(tmp_path, SLOW.format(sleep=0.2, body=""), 100)
    assert output.reward_B.tolist() == [float(place) for place in range(100)]
    assert output.logs["most"].max() == 64  # and not all 100
    output = opened(tmp_path, SLOW.format(sleep=0.2, body=""), 10, workers=2)
    assert output.logs["most"].max() == 5


def test_sixteen_waits_of_half_a_second_take_less_than_two_one_after_the_other() -> None:
    async def compute_score(solution_str: str) -> float:
        await asyncio.sleep(0.5)
        return float(solution_str)

    texts = list(map(str, range(16)))
    began = time.monotonic()
    assert by_names(compute_score)(texts, texts, texts, texts, [{}] * 16).rewards == list(range(16))
    assert time.monotonic() - began < 4  # one after the other they take 8 s


def test_each_response_of_an_async_function_fails_alone(tmp_path: Path) -> None:
    body = (
        "if ground_truth == '3': raise KeyError('no such key')\n"
        "    if ground_truth == '5': await asyncio.sleep(600)\n"
        "    if ground_truth == '7': return 'seven'\n"
        "    if ground_truth == '8': return float('nan')"
    )
    output = opened(tmp_path, SLOW.format(sleep=0.01, body=body), 40, timeout_s=2)
    assert list(output.failures) == [3, 5, 7, 8]
    for place, facts in {3: ["KeyError", "no such key"], 5: ["2 s"], 7: ["str"], 8: ["nan"]}.items():
        assert re.search(says(*facts, f"response {place}"), output.failures[place])
    assert output.reward_B.tolist() == [0.0 if place in output.failures else float(place) for place in range(40)]
    assert output.logs["most"].isnan().tolist() == [place in output.failures for place in range(40)]


def test_an_async_function_that_blocks_its_process_is_killed(tmp_path: Path) -> None:
    body = "import time\n    if ground_truth == '3': time.sleep(600)"
    output = opened(tmp_path, SLOW.format(sleep=0.01, body=body), 30, timeout_s=0.3)
    assert list(output.failures) == [3]


def test_an_async_function_has_one_event_loop_for_its_clients(tmp_path: Path) -> None:
    body = (
        "import asyncio\nloops = set()\n\n"
        "async def compute_score(solution_str, ground_truth):\n"
        "    loops.add(id(asyncio.get_running_loop()))\n"
        "    return float(len(loops))\n"
    )
    (tmp_path / "own.py").write_text(body)
    with WorkerReward(str(tmp_path / "own.py"), RewardSettings()) as reward:
        for _ in range(3):
            assert reward(["1", "2"], ["", ""], ["", ""]).reward_B.tolist() == [1.0, 1.0]
