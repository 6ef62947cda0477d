"""Scores on held-out prompts over a run."""

import re

import torch

from components.batch import Batch
from components.engines.config import SamplingConfig
from training.evaluation import Evaluation


def prompts() -> Batch:
    """Two prompts of one token."""
    return Batch(
        [1, 1], {"tokens": torch.tensor([3, 4])}, {"prompt_id": torch.tensor([0, 1])}, {"datasource": ["a"] * 2}
    )


class Policy:
    """Responses with one token each; the second response to a prompt is right, and greedy ones are when it has
    learnt.
    """

    def __init__(self) -> None:
        self.learnt = False
        self.asked: list[tuple[int, float]] = []
        self.narrowed: list[tuple[float, int]] = []

    def response(self, asked: Batch, sampling: SamplingConfig) -> Batch:
        temperature = sampling.temperature
        self.asked.append((len(asked), temperature))
        self.narrowed.append((sampling.top_p, sampling.top_k))
        right_B = (asked["sample_id"] == 1) | torch.tensor(self.learnt and temperature == 0)
        return Batch(
            [2] * len(asked),
            {"tokens": torch.zeros(2 * len(asked)), "action_mask": torch.tensor([False, True] * len(asked))},
            {
                "score": right_B.float(),
                "prompt_id": asked["prompt_id"],
                "truncated": torch.zeros(len(asked), dtype=torch.bool),
                "log_greedy": torch.full([len(asked)], float(temperature == 0)),
            },
            {"datasource": asked["datasource"]},
        )


def heldout(policy: Policy, said: list[str], batch: Batch | None = None) -> Evaluation:
    return Evaluation(
        prompts=batch,
        response=policy.response,
        sampling=SamplingConfig(temperature=0.5, top_p=0.7, top_k=9),
        samples_per_prompt=2,
        best_metric_key="",
        info=said.append,
    )


def test_a_run_is_scored_at_its_start_and_its_end_and_the_best_step_is_known() -> None:
    policy, said = Policy(), []
    scores = heldout(policy, said, prompts())
    scores.start(0)
    # Sampled and greedy once each, then two responses to each of two prompts.
    assert policy.asked == [(2, 1.0), (2, 0.0), (4, 0.5)]
    # The two scores are of all tokens, whatever the evaluation is drawn from.
    assert policy.narrowed == [(1.0, 0), (1.0, 0), (0.7, 9)]
    assert scores.scores["start"]["eval/a_pass1"] == 0.5
    assert scores.scores["start"]["eval/a_pass2"] == 1.0
    assert scores.scores["start"]["eval/response_length_mean"] == 1.0
    assert scores.scores["start"]["eval/a_greedy"] == 0.0
    scores.start(0)
    assert len(policy.asked) == 3
    middle = scores.at_step(is_last=False)
    assert "eval/score" not in middle
    assert scores.is_best(middle)
    assert not scores.is_best(middle)
    assert not scores.is_best({"reward/score": 1.0})
    policy.learnt = True
    # The run ends at a step of which nobody knew that it was the last: it is scored now.
    summary = scores.finish(7)
    assert summary == {"start": 0.0, "start_greedy": 0.0, "end": 0.0, "end_greedy": 1.0, "examples": 2}
    assert re.findall(r"[0-9.]+", said[-1]) == ["2", "0.000", "0.000", "0.000", "1.000"]


def test_a_run_that_is_not_scored_at_its_start_is_summed_up_by_its_end() -> None:
    policy, said = Policy(), []
    policy.learnt = True
    scores = heldout(policy, said, prompts())
    assert scores.is_best(scores.at_step(is_last=False))
    assert scores.finish(7) == {"start": None, "start_greedy": None, "end": 0.0, "end_greedy": 1.0, "examples": 2}
    assert re.findall(r"[0-9.]+", said[-1]) == ["2", "0.000", "1.000"]
    # Of the step four responses; of the end one sampled and one greedy to each prompt, and four again.
    assert [count for count, _ in policy.asked] == [4, 2, 2, 4]


def test_a_recipe_adds_metrics_of_its_own_of_the_same_answers() -> None:
    policy = Policy()
    scores = Evaluation(
        prompts=prompts(),
        response=policy.response,
        sampling=SamplingConfig(temperature=0.0),
        samples_per_prompt=2,
        best_metric_key="",
        info=lambda _: None,
        further=lambda responses: {"val-core/a/reward/best@2/mean": float(responses["score"].max())},
    )
    found = scores.at_step(is_last=False)
    assert (found["val-core/a/reward/best@2/mean"], found["eval/a_pass1"]) == (1.0, 0.5)
    assert policy.asked == [(4, 0.0)]
    assert scores.is_best(found)
    assert scores.best == ("a_pass1", 0.5)


def test_another_part_of_the_run_goes_on_with_the_scores() -> None:
    policy, said = Policy(), []
    first = heldout(policy, said, prompts())
    first.start(0)
    assert first.is_best(first.at_step(is_last=True))
    second = heldout(policy, said, prompts())
    second.load_state_dict(first.state_dict())
    asked = len(policy.asked)
    second.start(3)
    assert second.finish(3) == first.finish(3)
    assert len(policy.asked) == asked
    assert not second.is_best(second.scores["end"])


def test_without_prompts_everything_is_empty() -> None:
    policy, said = Policy(), []
    none = heldout(policy, said)
    none.start(0)
    assert (none.at_step(is_last=True), none.finish(1), policy.asked, said) == ({}, None, [], [])
    assert not none.is_best({"eval/x_pass1": 1.0})
