"""Metrics, records and checks of the responses of a step."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from components.batch import Batch
from components.batch.reading import load_batch
from components.data.samples import (
    add_rewards,
    check_rewarded,
    compare_samples,
    drop_unrewarded,
    for_samples,
    main_branches,
    with_status,
)
from components.rewards.base import Responses, RewardOutput, RewardSource
from components.rl.advantages import rloo
from plugins.demo.tiny_model import character_tokenizer
from tests.messages import says
from training.roles.updates import keep_failed, over_updates
from training.run.rollouts import check_staleness, record_step, rollout_metrics
from training.tracking import StepEvent, Tracker


def responses() -> Batch:
    """Return two responses, of 1, 2, 1 and 1 tokens, to each of two prompts of one token."""
    mask = [False, True, False, True, True, False, True, False, True]
    return Batch(
        [2, 3, 2, 2],
        {
            "tokens": torch.arange(9),
            "action_mask": torch.tensor(mask),
            # One of five tokens is twice as likely under the engine. Masked values must not be used.
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


def test_metrics_of_a_step_equal_a_calculation_by_hand() -> None:
    metrics = rollout_metrics(responses(), 0.6, 2.0, responses().select([0]))
    assert metrics["reward/reward"] == 2.0
    assert metrics["reward/score"] == 0.75
    assert metrics["reward/failed"] == 1.0
    assert metrics["reward/length"] == 1.25
    # Rewards 1 and 3 have the standard deviation sqrt(2), 2 and 2 have 0.
    assert metrics["reward/group_std"] == pytest.approx(math.sqrt(2) / 2)
    assert metrics["reward/zero_variance_share"] == 0.5
    assert metrics["rollout/response_length"] == 1.25
    assert metrics["rollout/truncated_share"] == 0.25
    assert metrics["rollout/logprob_gap_max"] == pytest.approx(math.log(2))
    # One of five tokens, with ratio 1/2.
    assert metrics["rollout/outside_share"] == pytest.approx(0.2)
    assert metrics["rollout/mismatch_kl"] == pytest.approx(math.log(2) / 5)


def test_responses_without_a_reward_are_excluded_from_metrics() -> None:
    left = drop_unrewarded(responses())
    assert left["prompt_id"].tolist() == [7, 7, 9]
    assert left["reward"].tolist() == [1.0, 3.0, 2.0]
    assert left["action_mask"].tolist() == [False, True, False, True, True, False, True]
    assert drop_unrewarded(left) is left


def test_status_shares_include_episodes_without_a_reward() -> None:
    ended = ["finished", "truncated", "error", "finished"]
    episodes = responses().with_sequences(num_turns=torch.ones(4)).with_objects(status=ended)
    metrics = rollout_metrics(drop_unrewarded(episodes), failed=episodes.select([2]))
    shares = [metrics[f"rollout/{name}_share"] for name in ("finished", "truncated", "error")]
    assert (shares, metrics["reward/failed"]) == ([0.5, 0.25, 0.25], 1.0)


def test_prompts_with_one_response_have_no_group_metrics() -> None:
    assert "reward/group_std" not in rollout_metrics(responses().select([0, 2]))


def test_without_recomputed_log_probs_no_mismatch_is_logged() -> None:
    alone = responses().only(*(name for name in responses().names if name != "logprob"))
    metrics = rollout_metrics(alone)
    assert metrics["reward/reward"] == 2.0
    assert [name for name in metrics if "logprob" in name or "mismatch" in name] == []


def test_samples_of_a_prompt_are_adjacent_and_numbered() -> None:
    prompts = Batch([1, 1], {"tokens": torch.tensor([3, 4])}, {"prompt_id": torch.tensor([7, 9])})
    requests = for_samples(prompts, 3)
    assert requests["prompt_id"].tolist() == [7, 7, 7, 9, 9, 9]
    assert requests["sample_id"].tolist() == [0, 1, 2, 0, 1, 2]


def test_each_response_has_the_status_finished_or_truncated() -> None:
    assert with_status(responses())["status"] == ["finished", "truncated", "finished", "finished"]


class Lengths(RewardSource):
    """Rewards the length of each response. Responses in `failing` get no reward."""

    source = "lengths"

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self.failing = failing
        self.asked: tuple[Any, ...] = ()

    def reward(self, samples: Responses) -> RewardOutput:
        assert samples.responses is not None
        self.asked = (samples.queries, samples.prompts, samples.labels, samples.responses)
        reward_B = torch.tensor([0.0 if i in self.failing else len(text) for i, text in enumerate(samples.responses)])
        failures = {i: f"no number in {i}" for i in self.failing}
        return RewardOutput(reward_B, reward_B / 4, {"vowels": torch.ones(len(samples.queries))}, failures)

    def close(self) -> None:
        """Do nothing, because no process was started."""


def texts(count: int) -> Batch:
    """Return responses to the prompt "ab", each one letter longer: "c", "cc", ..., and an end token that is not
    shown.
    """
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
    scored = add_rewards(texts(2), source, character_tokenizer("abc"), said.append)
    queries, prompts, labels, responses = source.asked
    end = character_tokenizer("abc").eos_token
    assert (queries, prompts, labels) == ([f"abc{end}", f"abcc{end}"], ["ab", "ab"], ["0", "1"])
    assert responses == ["c", "cc"]
    columns = [scored[name].tolist() for name in ("reward", "score", "reward_failed", "log_vowels")]
    assert columns == [[1, 2], [0.25, 0.5], [0, 0], [1, 1]]
    assert said == []


def test_queries_are_decoded_only_for_rewards_that_read_them() -> None:
    source, decoded = Lengths(), Lengths()
    source.reads_queries = False
    tokenizer = character_tokenizer("abc")
    scored, expected = (add_rewards(texts(3), each, tokenizer, print) for each in (source, decoded))
    assert source.asked == (["", "", ""], *decoded.asked[1:])
    assert scored["reward"].tolist() == expected["reward"].tolist()


def test_the_first_failed_rewards_are_named_and_all_are_counted() -> None:
    said: list[str] = []
    scored = add_rewards(texts(6), Lengths([0, 2, 3, 5]), character_tokenizer("abc"), said.append)
    assert scored["reward_failed"].tolist() == [1, 0, 1, 1, 0, 1]
    assert len(said) == 4
    for line, facts in zip(
        said, (["response 0", "no number in 0"], ["response 2"], ["response 3", "no number in 3"], [1])
    ):
        assert re.search(says(*facts), line)


def test_metrics_of_a_step_are_means_over_updates_and_log_the_first_separately() -> None:
    history = [{"loss": 1.0, "ratio_mean": 1.0, "engine_gap": 0.5}, {"loss": 3.0, "ratio_mean": 1.5, "engine_gap": 0.0}]
    assert over_updates(history) == {
        "loss": 2.0,
        "ratio_mean": 1.25,
        "engine_gap": 0.25,
        "first_ratio_mean": 1.0,
        "first_engine_gap": 0.5,
    }
    assert over_updates([{"loss": 1.0}]) == {"loss": 1.0}


def test_a_failed_batch_is_saved_by_one_rank_and_named_by_all(tmp_path: Path) -> None:
    path = tmp_path / "failed" / "step_000012-actor.parquet"
    assert keep_failed(str(tmp_path), 12, "ACTOR", responses(), rank=1) == f"the batch is in {path}"
    assert not path.exists()
    assert keep_failed(str(tmp_path), 12, "ACTOR", responses(), rank=0) == f"the batch is in {path}"
    assert load_batch(path)["reward"].tolist() == [1.0, 3.0, 2.0, 2.0]


def test_a_step_is_logged_and_reported_to_observers(tmp_path: Path) -> None:
    events: list[StepEvent] = []
    tracker = Tracker(tmp_path, "demo", {}, 0, emit=events.append, shown=("eval/score", "reward/"))
    metrics = {"reward/score": 0.5, "actor/loss": 2.0}
    texts = {"prompt": ["a", "a", "b", "b"], "label": [1, 1, 2, 2]}
    samples = with_status(responses().with_sequences(prompt_length=torch.ones(4).long()).with_objects(**texts))
    record_step(tracker, 3, 9, metrics, samples, character_tokenizer("abcdefghi"))
    tracker.close()
    (event,) = events
    assert (event.step, event.steps, event.metrics, event.shown) == (3, 9, metrics, ("reward/score",))
    assert event.sample is not None and event.sample["reward"] == 1.0
    # The first response has the tokens 0 and 1, which differ from the text of the prompt.
    decode = character_tokenizer("abcdefghi").decode
    assert (event.sample["prompt"], event.sample["response"]) == (decode([0]), decode([1]))
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (line["step"], line["actor/loss"]) == (3, 2.0)
    assert len(load_batch(tmp_path / "rollouts" / "step_000003.parquet")) == 4
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3


def test_responses_that_cannot_be_decoded_do_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events: list[StepEvent] = []
    tracker = Tracker(tmp_path, "demo", {}, 0, sinks={"tensorboard": {}}, emit=events.append)
    samples = with_status(responses().with_sequences(prompt_length=torch.ones(4).long()))
    samples = samples.with_objects(prompt=["a"] * 4, label=[1] * 4)
    tokenizer: Any = object()  # a tokenizer without decode and save_pretrained
    for step in (1, 11):
        record_step(tracker, step, 20, {"reward/score": 0.5}, samples, tokenizer)
    tracker.close()
    assert [(event.step, event.sample) for event in events] == [(1, None), (11, None)]
    switched_off = [record.getMessage() for record in caplog.records]
    assert len(switched_off) == 3
    for text, what in zip(switched_off, ("response", "tokenizer", "samples")):
        assert what in text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_without_recomputed_log_probs_the_mismatch_comes_from_the_first_update(tmp_path: Path) -> None:
    events: list[StepEvent] = []
    tracker = Tracker(tmp_path, "demo", {}, 0, emit=events.append)
    samples = with_status(responses().with_sequences(prompt_length=torch.ones(4).long()))
    samples = samples.with_objects(prompt=["a"] * 4, label=[1] * 4)
    for pass_of_trainer in ({}, {"rollout/logprob_gap_mean": 0.25}):
        metrics = {"actor/first_engine_gap": 0.5, **pass_of_trainer}
        record_step(tracker, 1, 2, metrics, samples, character_tokenizer("abcdefghi"))
    tracker.close()
    assert [event.metrics["rollout/logprob_gap_mean"] for event in events] == [0.5, 0.25]


def test_an_engine_with_an_old_weight_version_is_reported() -> None:
    check_staleness(responses().select([0, 1]), 4)
    with pytest.raises(RuntimeError, match=says("1 responses", "version [3]", "version 4")):
        check_staleness(responses(), 4)
    with pytest.raises(RuntimeError, match=says("version [4]", "version 3", 1)):
        check_staleness(responses(), 3, most=1)


def test_staleness_of_responses_is_limited_and_logged() -> None:
    checked = check_staleness(responses(), 5, most=2)
    assert checked["staleness"].tolist() == [1, 1, 2, 1]
    with pytest.raises(RuntimeError, match=says("version [3]", "version 5", 1)):
        check_staleness(responses(), 5, most=1)
    metrics = rollout_metrics(checked)
    assert (metrics["rollout/staleness_mean"], metrics["rollout/staleness_max"]) == (1.25, 2.0)
    assert "rollout/token_staleness_mean" not in metrics
    # The five response tokens have versions 4, 4, 5, 3 and 5. The trainer has version 5.
    version_N = torch.tensor([-1, 4, -1, 4, 5, -1, 3, -1, 5])
    metrics = rollout_metrics(checked.with_tokens(token_version=version_N))
    assert metrics["rollout/token_staleness_mean"] == pytest.approx(0.8)
    assert [name for name in rollout_metrics(responses()) if "staleness" in name] == []


def test_a_log_is_averaged_over_the_responses_that_have_it() -> None:
    nan = math.nan
    metrics = rollout_metrics(
        responses().with_sequences(log_wins=torch.tensor([1.0, nan, 0.0, nan]), log_none=torch.full([4], nan))
    )
    assert metrics["reward/wins"] == 0.5
    assert "reward/none" not in metrics


def test_episodes_are_counted_by_how_they_ended() -> None:
    played = responses().with_sequences(num_turns=torch.tensor([1, 2, 3, 4]))
    metrics = rollout_metrics(played.with_objects(status=["finished", "truncated", "error", "finished"]))
    shares = [metrics[f"rollout/{name}_share"] for name in ("finished", "truncated", "aborted", "error")]
    assert (shares, metrics["rollout/turns_mean"]) == ([0.5, 0.25, 0.0, 0.25], 2.5)
    assert "rollout/finished_share" not in rollout_metrics(with_status(responses()))


def test_an_existing_status_is_kept() -> None:
    assert with_status(responses().with_objects(status=["error"] * 4))["status"] == ["error"] * 4


def test_only_the_main_sequence_of_an_episode_is_scored() -> None:
    assert main_branches(responses())["reward"].tolist() == [1, 3, 2, 2]
    assert main_branches(responses().with_sequences(branch=torch.tensor([0, 1, 0, 0])))["reward"].tolist() == [1, 2, 2]


def test_a_sample_with_branches_counts_once_in_its_group() -> None:
    # Prompt 7: the first sample has two sequences and reward 1, the second one reward 0. RLOO gives 1 - 0 and 0 - 1.
    columns = {"prompt_id": torch.tensor([7, 7, 7]), "branch": torch.tensor([0, 1, 0])}
    samples = Batch.from_rows({"tokens": [[1], [2], [3]]}, per_sequence=columns)
    assert compare_samples(samples, torch.tensor([1.0, 1.0, 0.0]), rloo).tolist() == [1, 1, -1]
    # As three samples, the first two would include each other's reward in their mean: 1 - (1 + 0) / 2.
    assert compare_samples(samples.without("branch"), torch.tensor([1.0, 1.0, 0.0]), rloo).tolist() == [0.5, 0.5, -1]


def test_episodes_without_a_reward_are_refused() -> None:
    samples = Batch.from_rows({"tokens": [[1]]}, objects={"error": [""]})
    with pytest.raises(ValueError, match="agent_func_path"):
        check_rewarded(samples)
