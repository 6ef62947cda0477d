"""Metrics of several responses per prompt, calculated by hand. B responses."""

import math

import numpy as np
import pytest
import torch

from training.run.validation import majority, validation_metrics

NAN = math.nan


def test_the_score_of_a_majority_is_that_of_its_first_response() -> None:
    # Votes 0, 1, 1: majority 1, whose first response has value 5. Votes 2, 0, 2, ...: majority 2, whose first has value
    # 1. Votes 1, 0, 0, 1: a tie, 1 was sampled first. Votes 0, 1, 1, 0: a tie, 0 was sampled first. All different: the
    # first one.
    value_kR = np.array([[9.0, 5.0, 7.0, 3.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]).T
    vote_kR = np.array([[0, 1, 1, 2], [2, 0, 2, 1], [1, 0, 0, 1], [0, 1, 1, 0]]).T
    assert majority(value_kR, vote_kR).tolist() == [5.0, 1.0, 1.0, 5.0]
    assert majority(value_kR[:, :1], np.array([[3], [2], [1], [0]])).tolist() == [9.0]


def test_one_response_per_prompt_has_only_a_mean() -> None:
    # Prompt 0 of gsm and prompt 0 of math are two prompts.
    metrics = validation_metrics(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 1, 0]), ["gsm", "gsm", "math"])
    assert metrics == {"val-core/gsm/reward/mean@1": 0.5, "val-core/math/reward/mean@1": 0.5}
    assert all(type(value) is float for value in metrics.values())


def test_metrics_of_two_responses_per_prompt_equal_a_calculation_by_hand() -> None:
    # The responses to prompt 7 score 1 and 0 in any order, those to prompt 3 both 0.5. Mean (0.5 + 0.5) / 2, deviation
    # (0.5 + 0) / 2. The best of two bootstrap samples from 1 and 0 is 1 with probability 3/4, the worst with 1/4. The
    # deviation of both is sqrt(3) / 4. For prompt 3 all are 0.5 with deviation 0.
    metrics = validation_metrics(torch.tensor([1.0, 0.5, 0.0, 0.5]), torch.tensor([7, 3, 7, 3]), ["s"] * 4)
    assert metrics["val-core/s/reward/mean@2"] == 0.5
    assert metrics["val-aux/s/reward/std@2"] == 0.25
    drawn = {name: value for name, value in metrics.items() if "/best" in name or "/worst" in name}
    assert len(metrics) == 6
    expected = {
        "val-core/s/reward/best@2/mean": (0.75 + 0.5) / 2,
        "val-core/s/reward/best@2/std": math.sqrt(3) / 8,
        "val-aux/s/reward/worst@2/mean": (0.25 + 0.5) / 2,
        "val-aux/s/reward/worst@2/std": math.sqrt(3) / 8,
    }
    # With a thousand samples, three standard errors of a mean are 3 * 0.433 / sqrt(1000) = 0.04, and half of that over
    # two prompts.
    assert drawn == pytest.approx(expected, abs=0.025)


def test_majority_voting_is_logged_if_predictions_exist() -> None:
    # Three of four predictions are 4, which is correct. In four samples, 4 has the majority if it occurs 4 or 3 times
    # (81/256 + 108/256), or if it occurs twice (54/256) and first (half of those). In total 216/256 = 0.84.
    reward_B = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    said = ["4", "4", "5", "4", None, None, None, None]
    metrics = validation_metrics(reward_B, torch.zeros(8), ["a"] * 4 + ["b"] * 4, predictions=said)
    assert metrics["val-core/a/reward/maj@4/mean"] == pytest.approx(216 / 256, abs=0.035)
    # With two responses the first sample decides in any case: 0.75.
    assert metrics["val-aux/a/reward/maj@2/mean"] == pytest.approx(0.75, abs=0.042)
    assert not any(name.startswith(("val-core/b/reward/maj", "val-aux/b/reward/maj")) for name in metrics)
    assert "val-core/b/reward/best@4/mean" in metrics


def test_the_bootstrap_samples_are_deterministic() -> None:
    reward_B, prompt_B = torch.arange(12.0).square(), torch.arange(12) % 2
    first = validation_metrics(reward_B, prompt_B, ["s"] * 12, predictions=[str(i // 5) for i in range(12)])
    assert first == validation_metrics(reward_B, prompt_B, ["s"] * 12, predictions=[str(i // 5) for i in range(12)])
    ks = {name.partition("@")[2].partition("/")[0] for name in first if "/best@" in name}
    assert ks == {"2", "4", "6"}
    core = sorted(name.removeprefix("val-core/s/reward/") for name in first if name.startswith("val-core/"))
    assert core == ["best@6/mean", "best@6/std", "maj@6/mean", "maj@6/std", "mean@6"]


def test_the_core_metric_is_acc_if_logged_and_otherwise_the_reward() -> None:
    logged = {"acc": torch.tensor([1.0, NAN]), "reward": torch.tensor([9.0, 9.0]), "steps": torch.tensor([NAN, 3.0])}
    metrics = validation_metrics(torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), ["a", "b"], logged)
    assert metrics == {
        "val-core/a/acc/mean@1": 1.0,
        "val-aux/a/reward/mean@1": 0.5,
        "val-core/b/reward/mean@1": 0.25,
        "val-aux/b/steps/mean@1": 3.0,
    }


def test_a_response_without_a_logged_number_is_not_sampled() -> None:
    logged = {"moves": torch.tensor([NAN, 2.0, NAN, NAN])}
    metrics = validation_metrics(torch.ones(4), torch.tensor([0, 0, 1, 1]), ["a"] * 4, logged, ["x", "x", "y", "y"])
    moves = {name: value for name, value in metrics.items() if "/moves/" in name}
    names = ("mean@2", "std@2", "best@2/mean", "best@2/std", "worst@2/mean", "worst@2/std", "maj@2/mean", "maj@2/std")
    assert moves == {f"val-aux/a/moves/{name}": 0.0 if "std" in name else 2.0 for name in names}
