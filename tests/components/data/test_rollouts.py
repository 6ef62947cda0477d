"""What is said of a step's answers."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from components.batch import Batch
from components.data.rewards import RewardOutput
from components.data.rollouts import (
    check_version,
    for_samples,
    keep_failed,
    over_updates,
    record_step,
    rollout_metrics,
    score_answers,
    with_status,
)
from components.data.tiny_model import character_tokenizer
from components.tracking import Tracker


def answers() -> Batch:
    """Two prompts of one token, two answers each, of 1, 2, 1 and 1 tokens."""
    mask = [False, True, False, True, True, False, True, False, True]
    return Batch(
        [2, 3, 2, 2],
        {
            "tokens": torch.arange(9),
            "action_mask": torch.tensor(mask),
            # Twice as likely for the engine in one of five tokens; what is masked is not read.
            "logprob": torch.tensor([9.0, -1.0, math.nan, -1.0, -1.0, 0.0, -1.0, 0.0, -1.0]),
            "rollout_logprob": torch.tensor([0.0, math.log(2) - 1, 0.0, -1.0, -1.0, 0.0, -1.0, 0.0, -1.0]),
        },
        {
            "reward": torch.tensor([1.0, 3.0, 2.0, 2.0]),
            "score": torch.tensor([0.0, 1.0, 1.0, 1.0]),
            "shaped_reward": torch.tensor([-1.0, 1.0, 0.0, 0.0]),
            "reward_failed": torch.tensor([0.0, 0.0, 1.0, 0.0]),
            "truncated": torch.tensor([False, True, False, False]),
            "prompt_id": torch.tensor([7, 7, 9, 9]),
            "log_length": torch.tensor([1.0, 2.0, 1.0, 1.0]),
            "weight_version": torch.tensor([4, 4, 3, 4]),
        },
    )


def test_a_step_is_described_by_hand() -> None:
    found = rollout_metrics(answers(), 0.6, 2.0)
    assert found["reward/reward"] == 2.0
    assert found["reward/score"] == 0.75
    assert found["reward/failed"] == 1.0
    assert found["reward/length"] == 1.25
    # Rewards 1 and 3 have the deviation sqrt(2), 2 and 2 none.
    assert found["reward/group_std"] == pytest.approx(math.sqrt(2) / 2)
    assert found["reward/zero_variance_share"] == 0.5
    assert found["rollout/response_length"] == 1.25
    assert found["rollout/truncated_share"] == 0.25
    assert found["rollout/logprob_gap_max"] == pytest.approx(math.log(2))
    # One token in five, of ratio 1/2.
    assert found["rollout/outside_share"] == pytest.approx(0.2)
    assert found["rollout/mismatch_kl"] == pytest.approx(math.log(2) / 5)


def test_prompts_with_one_answer_have_no_groups() -> None:
    assert "reward/group_std" not in rollout_metrics(answers().select([0, 2]))


def test_without_a_pass_of_the_trainer_its_log_probabilities_are_compared_with_none() -> None:
    alone = answers().only(*(name for name in answers().names if name != "logprob"))
    found = rollout_metrics(alone)
    assert found["reward/reward"] == 2.0
    assert [name for name in found if "logprob" in name or "mismatch" in name] == []


def test_each_prompt_is_asked_side_by_side_and_its_samples_are_numbered() -> None:
    prompts = Batch([1, 1], {"tokens": torch.tensor([3, 4])}, {"prompt_id": torch.tensor([7, 9])})
    asked = for_samples(prompts, 3)
    assert asked["prompt_id"].tolist() == [7, 7, 7, 9, 9, 9]
    assert asked["sample_id"].tolist() == [0, 1, 2, 0, 1, 2]


def test_answers_are_cut_off_or_finished_in_words() -> None:
    assert with_status(answers())["status"] == ["finished", "truncated", "finished", "finished"]


class Lengths:
    """Rewards the length of each response; the answers in `failing` get none."""

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self.failing = failing
        self.asked: tuple[Any, ...] = ()

    def __call__(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], *, responses: Any = None
    ) -> RewardOutput:
        self.asked = (queries, prompts, labels, responses)
        reward_B = torch.tensor([0.0 if i in self.failing else len(text) for i, text in enumerate(responses)])
        failures = {i: f"no number in {i}" for i in self.failing}
        return RewardOutput(reward_B, reward_B / 4, {"vowels": torch.ones(len(queries))}, failures)

    def close(self) -> None:
        """Nothing was started."""


def texts(count: int) -> Batch:
    """The prompt "ab", each time with one answer more: "c", "cc", ..., and an end token that no response shows."""
    tokenizer = character_tokenizer("abc")
    rows = [
        [*tokenizer.encode("ab" + "c" * (i + 1), add_special_tokens=False), tokenizer.eos_token_id]
        for i in range(count)
    ]
    lengths = {"prompt_length": torch.full([count], 2)}
    objects = {"prompt": ["ab"] * count, "label": [str(i) for i in range(count)]}
    return Batch.from_rows({"tokens": rows}, per_sequence=lengths, objects=objects)


def test_reward_code_reads_text_and_its_numbers_become_columns() -> None:
    source, said = Lengths(), []
    scored = score_answers(texts(2), source, character_tokenizer("abc"), said.append)
    queries, prompts, labels, responses = source.asked
    end = character_tokenizer("abc").eos_token
    assert (queries, prompts, labels) == ([f"abc{end}", f"abcc{end}"], ["ab", "ab"], ["0", "1"])
    assert responses == ["c", "cc"]
    found = [scored[name].tolist() for name in ("reward", "score", "reward_failed", "log_vowels")]
    assert found == [[1, 2], [0.25, 0.5], [0, 0], [1, 1]]
    assert said == []


def test_the_first_failed_rewards_are_named_and_all_are_counted() -> None:
    said: list[str] = []
    scored = score_answers(texts(6), Lengths([0, 2, 3, 5]), character_tokenizer("abc"), said.append)
    assert scored["reward_failed"].tolist() == [1, 0, 1, 1, 0, 1]
    assert said[0] == "answer 0 gets reward 0, because its reward failed: no number in 0"
    assert said[2:] == ["answer 3 gets reward 0, because its reward failed: no number in 3", "and 1 more failed"]


def test_metrics_of_a_step_are_means_over_its_updates_and_tell_the_first_apart() -> None:
    history = [{"loss": 1.0, "ratio_mean": 1.0, "engine_gap": 0.5}, {"loss": 3.0, "ratio_mean": 1.5, "engine_gap": 0.0}]
    assert over_updates(history) == {
        "loss": 2.0,
        "ratio_mean": 1.25,
        "engine_gap": 0.25,
        "first_ratio_mean": 1.0,
        "first_engine_gap": 0.5,
    }
    assert over_updates([{"loss": 1.0}]) == {"loss": 1.0}


def test_a_batch_that_cannot_be_trained_on_is_kept_by_one_rank_and_named_by_all(tmp_path: Path) -> None:
    path = tmp_path / "failed" / "step_000012-actor.parquet"
    assert keep_failed(str(tmp_path), 12, "ACTOR", answers(), rank=1) == f"the batch is in {path}"
    assert not path.exists()
    assert keep_failed(str(tmp_path), 12, "ACTOR", answers(), rank=0) == f"the batch is in {path}"
    assert Batch.load(path)["reward"].tolist() == [1.0, 3.0, 2.0, 2.0]


def test_a_step_is_written_down_and_shown_under_names_for_people(tmp_path: Path) -> None:
    tracker, said = Tracker(tmp_path, "demo", {}, 0), []
    shown = {"reward/score": "score", "eval/score": "heldout"}
    metrics = {"reward/score": 0.5, "actor/loss": 2.0}
    record_step(tracker, 3, metrics, answers(), character_tokenizer("abc"), shown, said.append)
    tracker.close()
    assert said == ["step=3 score=0.5"]
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (line["step"], line["actor/loss"]) == (3, 2.0)
    assert len(Batch.load(tmp_path / "rollouts" / "step_000003.parquet")) == 4
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3


def test_an_engine_that_missed_an_update_is_found() -> None:
    check_version(answers().select([0, 1]), 4)
    with pytest.raises(
        RuntimeError, match=r"1 answers were sampled from weights of version \[3\], but the trainer is at"
    ):
        check_version(answers(), 4)
