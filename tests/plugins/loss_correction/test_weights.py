"""Factors of each token's loss by the value of algorithm.correction."""

import pytest
import torch

from components.registry import load

LENGTHS = torch.tensor([1, 2, 2, 3])


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        # p / q of the tokens of the four responses: 1 | 4 4 | 1/4 4 | 8 1 1. The geometric means are 1, 4, 1, 2.
        ("tis", [1, 2, 2, 0.5, 2, 2, 1, 1]),
        ("icepop", [1, 0, 0, 0, 0, 0, 1, 1]),
        ("seq-mask-tis", [1, 0, 0, 0.5, 2, 2, 1, 1]),
        ("seq-mask", [1, 0, 0, 0.25, 4, 8, 1, 1]),
    ],
)
def test_tokens_are_reweighted_by_the_ratio_of_trainer_and_engine(correction: str, weights: list[float]) -> None:
    logprob_N = torch.tensor([1, 4, 4, 0.25, 4, 8, 1, 1]).log() - 9
    columns = (logprob_N, torch.full((8,), -9.0), torch.ones(8, dtype=torch.bool), LENGTHS)
    factors_N = load("loss correction", correction)(*columns, low=0.5, high=2.0)
    assert factors_N.tolist() == pytest.approx(weights, abs=1e-5)
