"""One real call of each reward before a run starts: reported faults, and notes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.rewards.base import RewardSettings
from plugins.reward_trial.trial import try_rewards
from tests.components.helpers.closed_port import closed_port
from tests.components.helpers.reward_server import Answer, Request, RewardServer
from tests.messages import says

ROWS = [{"input": f"p{i}", "label": str(10**i), "datasource": "d", "extra_info": {"solution": i}} for i in range(4)]


def tried(folder: Path, function: str, rows: list[dict[str, Any]] = ROWS, heldout: Any = ()) -> list[str]:
    """Return the notes of a trial of a function in a file."""
    (folder / "own.py").write_text(function)
    return try_rewards(f"{folder}/own.py", "reward.source", {"the data": rows, "the held-out data": heldout})


def test_a_trial_calls_a_function_once_with_two_rows_of_different_lengths(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    (note,) = tried(
        tmp_path,
        "def f(completions, solution, completion_ids):\n"
        f"    open({str(calls)!r}, 'a').write(f'{{completions}} {{solution}}\\n')\n"
        "    assert len({*map(len, completions)}) == len({*map(len, completion_ids)}) == 2\n"
        "    return [float(number) for number in solution]\n",
    )
    assert re.search(says("reward.source", "own.py gives 0", "first row"), note)
    assert calls.read_text() == "['1', '10'] [0, 1]\n"


@pytest.mark.parametrize("label", ["", "same"])
def test_a_trial_of_rows_of_one_length_has_responses_of_two_lengths(label: str, tmp_path: Path) -> None:
    body = "def f(completions):\n    assert len({*map(len, completions)}) == 2\n    return [1.0] * len(completions)\n"
    tried(tmp_path, body, [{"input": "p", "label": label, "datasource": "d"}])


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ("return [1.0]", ["1 rewards", "2 responses"]),
        ("return {'rewards': [1.0]}", ["(1,)", "2 queries"]),
        ("return [1.0] * 3", ["3 rewards", "2 responses"]),
        ("return 1.0", ["float"]),
        ("return", ["NoneType"]),
        ("return torch.stack([torch.tensor([*map(ord, c)]) for c in completions]).sum(1)", ["RuntimeError", "size"]),
        ("return [float('nan')] * len(completions)", ["nan"]),
        ("return (1.0 for _ in completions)", ["generator"]),
    ],
)
def test_a_function_that_fails_for_a_batch_is_refused(body: str, facts: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says("reward.source", "own.py", "first row", *facts)):
        tried(tmp_path, f"import torch\ndef f(completions, **kwargs):\n    {body}\n")


@pytest.mark.parametrize("name", ["def f(a, b)", "async def f(a, b)", "def f(completions, lost)"])
def test_a_function_with_unknown_parameters_is_refused_with_their_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says("reward.source", "solution", "no such column")):
        tried(tmp_path, f"{name}:\n    return [0.0] * 2\n")


def test_columns_missing_in_held_out_rows_are_reported(tmp_path: Path) -> None:
    body = "def f(completions, solution):\n    return [0.0] * len(completions)\n"
    heldout = [{"input": "p", "label": "1", "datasource": "d", "extra_info": {"level": 1}}]
    tried(tmp_path, body, heldout=ROWS)
    with pytest.raises(ValueError, match=says("held-out", "'solution'", "level")):
        tried(tmp_path, body, heldout=heldout)


def test_each_kind_of_row_is_tried(tmp_path: Path) -> None:
    body = "def f(prompts, completions, **kwargs):\n    return [float(len(c[0]['content'])) for c in completions]\n"
    turns = [{"role": "user", "content": "p"}]
    messages = [{"input": turns, "label": "1", "datasource": "d", "extra_info": {"prompt": turns}}] * 9
    assert "gives 1" in tried(tmp_path, body, messages)[0]
    with pytest.raises(ValueError, match=says("the data", "row 9 is text", "row 0", "messages")):
        tried(tmp_path, body, [*messages, ROWS[0]])
    with pytest.raises(ValueError, match=says("the held-out data", "row 0 is text", "row 1")):
        tried(tmp_path, body, messages, [ROWS[0], messages[0]])
    by_source = "def f(data_source, solution_str):\n    return {'d': 1.0}[data_source]\n"
    with pytest.raises(ValueError, match="KeyError: 'other'"):
        tried(tmp_path, by_source, [*ROWS, ROWS[0] | {"datasource": "other"}])


def test_the_parts_of_a_sum_and_renamed_logs_are_listed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def good(completions, log_metric):\n    log_metric('failed', 1.0)\n    return [1.0] * len(completions)\n"
        "def brief(completions):\n    return [0.0] * len(completions)\n"
    )
    spec = f"1*{tmp_path}/own.py:good + 0.2*{tmp_path}/own.py:brief"
    notes = try_rewards(spec, "reward.source", {"the data": ROWS})
    assert re.search(says("own.py:good", "'failed'", "log_failed"), notes[1])
    assert re.search(says("1 * reward/good + 0.2 * reward/brief", "reward/score", "1.2"), notes[-1])


# Servers.


@pytest.fixture
def server() -> Iterator[RewardServer]:
    reward_server = RewardServer(right)
    yield reward_server
    reward_server.shutdown()
    reward_server.server_close()


def right(request: Request, number: int) -> Answer:
    return 200, {"rewards": [1.0] * len(request["query"])}, {}


def test_a_trial_calls_a_server_once_with_two_rows_and_a_plan_does_not(server: RewardServer) -> None:
    assert try_rewards(server.url, "reward.source", {"the data": ROWS}) == []
    assert server.requests == [{"query": ["p01", "p110"], "prompts": ["p0", "p1"], "labels": ["1", "10"]}]
    (note,) = try_rewards(server.url, "reward.source", {"the data": ROWS}, calls_servers=False)
    assert re.search(says("reward.source", server.url), note) and len(server.requests) == 1


def test_a_server_that_cannot_score_is_refused_unless_another_one_works(server: RewardServer) -> None:
    with closed_port() as port:
        missing = f"http://127.0.0.1:{port}/score"
        with pytest.raises(ValueError, match=says("reward.source", missing, "ConnectError")):
            try_rewards(missing, "reward.source", {"the data": ROWS}, RewardSettings(url_tries=1))
        (note,) = try_rewards(f"{missing},{server.url}", "reward.source", {"the data": ROWS})
        assert missing in note
    for answer, facts in (
        ((404, b"no such page", {}), ["404", "no such page"]),
        ((200, {"rewards": [1.0]}, {}), ["(1,)", "2 queries"]),
        ((200, {"reward": 1.0}, {}), ["'reward'", "rewards"]),
    ):
        server.response = lambda request, number, answer=answer: answer
        with pytest.raises(ValueError, match=says("reward.source", server.url, *facts)):
            try_rewards(server.url, "reward.source", {"the data": ROWS})
