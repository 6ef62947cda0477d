"""Metrics on held-out prompts, calculated by hand. B responses."""

import math

import pytest
import torch

from tests.messages import says
from training.run.evaluation_metrics import best_metric, heldout_metrics


def test_metrics_of_two_sources_equal_a_calculation_by_hand() -> None:
    # Two responses per prompt, in any order. gsm: prompt 7 scores 1 and 0, prompt 3 scores 0 and 0.5. Mean (1 + 0 + 0 +
    # 0.5) / 4 = 0.375, best (1 + 0.5) / 2 = 0.75, mean length (4 + 8 + 2 + 6) / 4 = 5, one of 4 truncated. aime:
    # another prompt 7 scores 0.25 and 0.75. Mean 0.5, best 0.75, mean length (10 + 20) / 2 = 15, both truncated. In
    # total: (20 + 30) / 6 tokens, 3 of 6 truncated, scores 2.5 / 6, best (1 + 0.5 + 0.75) / 3.
    metrics = heldout_metrics(
        torch.tensor([1.0, 0.0, 0.25, 0.0, 0.5, 0.75]),
        torch.tensor([7, 3, 7, 7, 3, 7]),
        ["gsm", "gsm", "aime", "gsm", "gsm", "aime"],
        torch.tensor([4, 8, 10, 2, 6, 20]),
        torch.tensor([False, True, True, False, False, True]),
    )
    assert metrics == pytest.approx(
        {
            "score": 2.5 / 6,
            "pass2": 0.75,
            "aime_score": 0.5,
            "aime_pass2": 0.75,
            "aime_response_length_mean": 15.0,
            "aime_truncated_rate": 1.0,
            "gsm_score": 0.375,
            "gsm_pass2": 0.75,
            "gsm_response_length_mean": 5.0,
            "gsm_truncated_rate": 0.25,
            "response_length_mean": 50 / 6,
            "truncated_rate": 0.5,
            "num_samples": 6.0,
        }
    )
    assert list(metrics)[:7] == [
        "score",
        "pass2",
        "aime_score",
        "aime_pass2",
        "aime_response_length_mean",
        "aime_truncated_rate",
        "gsm_score",
    ]
    assert all(type(value) is float for value in metrics.values())


def test_logged_numbers_are_averaged_per_source_and_never_replace_built_in_metrics() -> None:
    metrics = heldout_metrics(
        torch.tensor([1.0, 0.0, 0.0]),
        torch.tensor([0, 1, 0]),
        ["a", "a", "b"],
        torch.tensor([1, 1, 1]),
        torch.tensor([False, False, False]),
        {"marks": torch.tensor([1.0, 0.5, 0.0]), "score": torch.tensor([9.0, 9.0, 9.0])},
    )
    assert (metrics["a_marks"], metrics["b_marks"]) == (0.75, 0.0)
    assert (metrics["a_score"], metrics["b_score"]) == (0.5, 0.0)


def test_a_logged_number_is_averaged_over_the_responses_that_have_it() -> None:
    one_B, nan = torch.ones(3), math.nan
    logged = {"moves": torch.tensor([1.0, nan, nan])}
    metrics = heldout_metrics(one_B, torch.tensor([0, 1, 0]), ["a", "a", "b"], one_B, one_B, logged)
    assert metrics["a_moves"] == 1.0
    assert "b_moves" not in metrics


def test_one_response_per_prompt_has_no_best_of_n() -> None:
    metrics = heldout_metrics(
        torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), ["s", "s"], torch.tensor([1, 2]), torch.tensor([False, False])
    )
    assert [name for name in metrics if "pass" in name] == []
    assert (metrics["score"], metrics["s_score"]) == (0.5, 0.5)


def test_the_best_of_negative_scores_is_the_least_negative() -> None:
    metrics = heldout_metrics(
        torch.tensor([-3.0, -1.0, -2.0]), torch.zeros(3, dtype=torch.int64), ["s"] * 3, torch.ones(3), torch.zeros(3)
    )
    assert metrics["s_pass3"] == -1.0


METRICS = {
    "score": 0.15,
    "zebra_score": 0.1,
    "zebra_pass4": 0.9,
    "ape_score": 0.2,
    "truncated_rate": 0.3,
    "eval_of_eval_score": 0.4,
}


@pytest.mark.parametrize(
    ("key", "metric"),
    [
        ("", ("score", 0.15)),
        ("eval/score", ("score", 0.15)),
        ("eval_ape_pass1", ("ape_score", 0.2)),  # the name in OpenRLHF
        ("none", None),
        ("zebra_pass4", ("zebra_pass4", 0.9)),
        ("eval/zebra_pass4", ("zebra_pass4", 0.9)),
        ("eval_truncated_rate", ("truncated_rate", 0.3)),
        ("eval_of_eval_score", ("eval_of_eval_score", 0.4)),
    ],
)
def test_the_deciding_metric_is_the_configured_one_or_the_score(key: str, metric: tuple[str, float] | None) -> None:
    assert best_metric(METRICS, key) == metric


def test_the_error_for_an_unknown_metric_lists_the_existing_ones() -> None:
    with pytest.raises(ValueError, match=says("'eval/x'", *METRICS)):
        best_metric(METRICS, "eval/x")
    with pytest.raises(ValueError, match=says("'ape'")):
        best_metric(METRICS, "ape")
    with pytest.raises(ValueError, match=says("'score'", "'truncated_rate'")):
        best_metric({"truncated_rate": 0.0}, "")
