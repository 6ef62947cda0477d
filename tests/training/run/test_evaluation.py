"""Scores on held-out prompts over a run."""

import re

import pytest
import torch

from components.batch import Batch
from components.generate.config import SamplingConfig
from components.rewards.errors import RewardError
from tests.messages import says
from training.run.evaluation import Evaluation


def prompts() -> Batch:
    """Two prompts of one token."""
    return Batch(
        [1, 1], {"tokens": torch.tensor([3, 4])}, {"prompt_id": torch.tensor([0, 1])}, {"datasource": ["a"] * 2}
    )


class Policy:
    """Return responses with one token each. The second response to a prompt is correct. Greedy ones are correct once
    the policy has learnt.
    """

    def __init__(self) -> None:
        self.learnt = False
        self.asked: list[tuple[int, float]] = []
        self.narrowed: list[tuple[float, int]] = []
        self.failing: list[int] = []
        """Indices of responses without a reward."""

    def response(self, prompts_B: Batch, sampling: SamplingConfig) -> Batch:
        temperature = sampling.temperature
        self.asked.append((len(prompts_B), temperature))
        self.narrowed.append((sampling.top_p, sampling.top_k))
        right_B = (prompts_B["sample_id"] == 1) | torch.tensor(self.learnt and temperature == 0)
        responses = Batch(
            [2] * len(prompts_B),
            {"tokens": torch.zeros(2 * len(prompts_B)), "action_mask": torch.tensor([False, True] * len(prompts_B))},
            {
                "score": right_B.float(),
                "prompt_id": prompts_B["prompt_id"],
                "truncated": torch.zeros(len(prompts_B), dtype=torch.bool),
                "log_greedy": torch.full([len(prompts_B)], float(temperature == 0)),
            },
            {"datasource": prompts_B["datasource"]},
        )
        return responses.select(~torch.isin(torch.arange(len(prompts_B)), torch.tensor(self.failing)))


def heldout(policy: Policy, said: list[str], batch: Batch | None = None, greedy: bool = True) -> Evaluation:
    return Evaluation(
        prompts=batch,
        response=policy.response,
        sampling=SamplingConfig(temperature=0.5, top_p=0.7, top_k=9),
        samples_per_prompt=2,
        best_metric_key="",
        info=said.append,
        greedy=greedy,
    )


def test_each_evaluation_has_the_score_and_the_best_step_is_known() -> None:
    policy, said = Policy(), []
    scores = heldout(policy, said, prompts())
    first = scores.start()
    # Two sampled responses to each of two prompts, and one greedy response to each.
    assert policy.asked == [(4, 0.5), (2, 0.0)]
    # Greedy sampling uses the full vocabulary, regardless of the sampling options.
    assert policy.narrowed == [(0.7, 9), (1.0, 0)]
    assert (first["eval/score"], first["eval/score_greedy"], first["eval/failed"]) == (0.5, 0.0, 0.0)
    assert (first["eval/pass2"], first["eval/a_score"], first["eval/a_pass2"]) == (1.0, 0.5, 1.0)
    assert first["eval/response_length_mean"] == 1.0
    assert first["eval/a_greedy"] == 0.0
    assert scores.start() == {}
    policy.learnt = True
    last = scores.at_step(7)
    assert (last["eval/score"], last["eval/score_greedy"]) == (0.5, 1.0)
    assert scores.is_best(last)
    assert not scores.is_best(last)
    assert not scores.is_best({"reward/score": 1.0})
    assert scores.best == ("score", 0.5)
    requests = len(policy.asked)
    summary = scores.finish(7)
    assert summary == {"start": 0.5, "start_greedy": 0.0, "end": 0.5, "end_greedy": 1.0, "examples": 2}
    assert re.findall(r"[0-9.]+", said[-1]) == ["2", "0.500", "0.500", "0.000", "1.000"]
    assert len(policy.asked) == requests


def test_disabled_evaluations_sample_nothing_and_have_no_score() -> None:
    policy, said = Policy(), []
    scores = heldout(policy, said, prompts(), greedy=False)
    assert "eval/score_greedy" not in scores.at_step(7)
    assert policy.asked == [(4, 0.5)]
    assert scores.finish(7) == {"start": None, "start_greedy": None, "end": 0.5, "end_greedy": None, "examples": 2}
    assert re.findall(r"[0-9.]+", said[-1]) == ["2", "0.500"]


def test_a_run_that_ends_early_is_evaluated_at_its_last_step() -> None:
    policy, said = Policy(), []
    scores = heldout(policy, said, prompts())
    scores.start()
    scores.at_step(6)
    policy.learnt = True
    summary = scores.finish(7)
    assert summary is not None
    assert (summary["end"], summary["end_greedy"]) == (0.5, 1.0)
    assert scores.finish(7) == summary
    assert policy.asked == [(4, 0.5), (2, 0.0)] * 3


def test_a_response_without_a_reward_is_excluded_from_means_and_counted() -> None:
    policy = Policy()
    policy.failing = [0]  # one of four, the first of prompt 0, which scores 0; and one of two, that of prompt 0
    evaluation = heldout(policy, [], prompts()).at_step(7)
    # The remaining scores are 1 of prompt 0, and 0 and 1 of prompt 1.
    assert evaluation["eval/score"] == pytest.approx(2 / 3)
    assert (evaluation["eval/pass2"], evaluation["eval/failed"], evaluation["eval/num_samples"]) == (1.0, 2.0, 3.0)
    policy.failing = [0, 1, 2, 3]
    with pytest.raises(RewardError, match=says(4)):
        heldout(policy, [], prompts()).at_step(7)


def test_a_recipe_can_add_metrics_of_the_evaluated_responses() -> None:
    policy = Policy()
    scores = Evaluation(
        prompts=prompts(),
        response=policy.response,
        sampling=SamplingConfig(temperature=0.0),
        samples_per_prompt=2,
        best_metric_key="a_pass1",
        info=lambda _: None,
        further=lambda responses: {"val-core/a/reward/best@2/mean": float(responses["score"].max())},
    )
    metrics = scores.at_step(7)
    assert (metrics["val-core/a/reward/best@2/mean"], metrics["eval/a_score"]) == (1.0, 0.5)
    assert policy.asked == [(4, 0.0)]
    assert scores.is_best(metrics)
    assert scores.best == ("a_score", 0.5)


def test_a_resumed_run_restores_the_scores_without_sampling_again() -> None:
    policy, said = Policy(), []
    first = heldout(policy, said, prompts())
    first.start()
    assert first.is_best(first.at_step(7))
    second = heldout(policy, said, prompts())
    second.load_state_dict(first.state_dict())
    requests = len(policy.asked)
    assert second.start() == {}
    assert second.finish(7) == first.finish(7)
    assert len(policy.asked) == requests
    assert not second.is_best(second.scores["end"])


def test_an_evaluation_without_prompts_has_no_metrics() -> None:
    policy, said = Policy(), []
    none = heldout(policy, said)
    assert (none.start(), none.at_step(7), none.finish(7), policy.asked, said) == ({}, {}, None, [], [])
    assert not none.is_best({"eval/x_score": 1.0})
