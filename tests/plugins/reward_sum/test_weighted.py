"""Weighted sums of rewards: syntax, values, and failures of parts."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.rewards.base import RewardSettings, check_reward, reward_parts
from components.rewards.errors import RewardError
from components.rewards.opening import open_reward
from plugins.reward_sum.weighted import RewardSum
from tests.components.helpers.reward_server import Answer, Request, RewardServer
from tests.messages import says

QUERIES = ["q ab", "q abc", "q b", "q bb"]
PROMPTS = ["q "] * 4
LABELS = ["ab", "ab", "b", "b"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write reward files into the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    length = "[float(len(q) - 2) for q in queries]"
    for name, result in (
        ("length", f'{{"rewards": {length}, "scores": [0.5] * len(queries), "extra_logs": {{"n": {length}}}}}'),
        ("fails_on_b", '{"rewards": [{"q ab": 1.0, "q abc": 1.0}[q] for q in queries]}'),
        ("a + b", '{"rewards": [4.0] * len(queries)}'),
    ):
        (tmp_path / f"{name}.py").write_text(
            f"def reward_func(queries, prompts, labels, **kwargs):\n    return {result}\n"
        )
    return tmp_path


@pytest.fixture
def server() -> Iterator[RewardServer]:
    def response(request: Request, number: int) -> Answer:
        return 200, {"rewards": [10.0] * len(request["query"]), "scores": [1.0] * len(request["query"])}, {}

    values = RewardServer(response)
    yield values
    values.shutdown()
    values.server_close()


def test_a_sum_of_a_scorer_a_file_and_a_server_adds_up_and_logs_each(files: Path, server: RewardServer) -> None:
    with open_reward(f"0.5*exact_match + 2*length.py + .1*{server.url}") as reward:
        output = reward(QUERIES, PROMPTS, LABELS)
    # Correct: ab and b. Lengths 2 3 1 2. The server returns 10: 0.5 * correct + 2 * length + 1.
    assert output.reward_B.tolist() == [5.5, 7.0, 3.5, 5.0]
    # Scores: correct, 0.5, 1, with total weight 2.6: (0.5 + 1 + 0.1) / 2.6 and (1 + 0.1) / 2.6.
    assert output.score_B.tolist() == pytest.approx([1.6 / 2.6, 1.1 / 2.6] * 2)
    assert {name: values.tolist() for name, values in output.logs.items()} == {
        "exact_match": [1, 0, 1, 0],
        "exact_match/score": [1, 0, 1, 0],
        "length": [2, 3, 1, 2],
        "length/score": [0.5] * 4,
        "length/n": [2, 3, 1, 2],
        "127_0_0_1_score": [10] * 4,
        "127_0_0_1_score/score": [1] * 4,
    }
    assert output.failures == {}


def test_a_response_correct_in_all_parts_has_a_score_of_exactly_1() -> None:
    with open_reward("0.1*exact_match + 0.2*exact_match + 0.7*exact_match") as reward:
        output = reward(["q1"], ["q"], ["1"])
    assert output.score_B.tolist() == [1.0] and output.reward_B.tolist() == [1.0]
    assert {name.partition("/")[0] for name in output.logs} == {"exact_match", "exact_match_2", "exact_match_3"}


def test_the_parts_of_a_sum_run_in_parallel(files: Path) -> None:
    # Each part waits until the two others have started.
    (files / "meets.py").write_text(
        "import os, time\n"
        "def reward_func(queries, prompts, labels):\n"
        "    open(f'{os.getpid()}.here', 'w').close()\n"
        "    while sum(name.endswith('.here') for name in os.listdir()) < 3: time.sleep(0.01)\n"
        "    return {'rewards': [1.0] * len(queries)}\n"
    )
    with open_reward("1*meets.py + 1*meets.py + 1*meets.py") as reward:
        assert reward(["q a"], ["q "], [""]).reward_B.tolist() == [3.0]


def test_a_response_that_fails_in_one_part_has_no_reward(files: Path) -> None:
    with open_reward("1*exact_match + 1*fails_on_b.py", RewardSettings(max_failed_share=0.5)) as reward:
        output = reward(QUERIES, PROMPTS, LABELS)
    assert output.reward_B.tolist() == [2.0, 1.0, 0.0, 0.0]
    assert output.score_B.tolist() == [1.0, 0.5, 0.0, 0.0]
    assert output.logs["exact_match"].tolist()[:2] == [1, 0]
    assert output.logs["exact_match"].isnan().tolist() == [False, False, True, True]
    assert sorted(output.failures) == [2, 3]
    assert re.search(says("fails_on_b", "KeyError: 'q b'", "response 2"), output.failures[2])


def test_failures_of_all_parts_together_stop_the_run(files: Path) -> None:
    body = "return {'rewards': [1 / ('a' not in q) for q in queries]}"
    (files / "fails_on_a.py").write_text(f"def reward_func(queries, prompts, labels): {body}")
    settings = RewardSettings(max_failed_share=0.6)
    failed = says("4 of 4", 0.6, "fails_on_a")
    with open_reward("1*fails_on_a.py + 1*fails_on_b.py", settings) as reward, pytest.raises(RewardError, match=failed):
        reward(QUERIES, PROMPTS, LABELS)


def test_too_many_failures_of_one_part_stop_the_run_and_name_it(files: Path) -> None:
    failed = says("fails_on_b.py", "1 of 4")
    with (
        open_reward("1*exact_match + 1*fails_on_b.py", RewardSettings(max_failed_share=0)) as reward,
        pytest.raises(RewardError, match=failed) as caught,
    ):
        reward(QUERIES, PROMPTS, LABELS)
    assert "'fails_on_b'" in caught.value.__notes__[-1]


def test_files_and_urls_of_a_sum_may_contain_plus_and_asterisk(files: Path) -> None:
    assert reward_parts("0.7*gsm8k + 3e-1 * a + b.py") == [(0.7, "gsm8k"), (0.3, "a + b.py")]
    assert reward_parts("1*http://a/x?y=1+2*3,http://b") == [(1.0, "http://a/x?y=1+2*3,http://b")]
    # A file alone is not a sum.
    assert reward_parts("a + b.py") == [(1.0, "a + b.py")]
    check_reward("1*exact_match + 2*a + b.py")
    with open_reward("0.5*a + b.py") as reward:
        assert isinstance(reward, RewardSum)
        assert reward(["q"], ["q"], [""]).reward_B.tolist() == [2.0]


@pytest.mark.parametrize(
    "spec", ["gsm8k + math", "gsm8k + 0.3*math", "0*gsm8k + 1*math", "-1*gsm8k", "1*gsm8k + 1*", "1e999*math"]
)
def test_a_sum_with_a_missing_or_invalid_weight_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=says(f"'{spec}'", "weight", "0.7*gsm8k")):
        check_reward(spec)


def test_a_part_that_cannot_be_opened_is_refused_and_the_others_are_closed(files: Path) -> None:
    with pytest.raises(ValueError, match="'sorted'"):
        check_reward("1*gsm8k + 1*sorted")
    (files / "broken.py").write_text("def reward_func(q, p, l): ...\nraise RuntimeError('no model')\n")
    check_reward("1*exact_match + 1*broken.py")
    with pytest.raises(ValueError, match=says("broken.py", "RuntimeError: no model")):
        open_reward("1*exact_match + 1*broken.py")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("spec", "reads"),
    [
        ("exact_match", False),
        ("0.5*exact_match + 0.5*exact_match", False),
        ("length.py", True),
        ("0.5*exact_match + 0.5*length.py", True),
    ],
)
def test_a_source_reads_queries_if_a_part_of_it_is_a_function(spec: str, reads: bool) -> None:
    with open_reward(spec) as source:
        assert source.reads_queries is reads
