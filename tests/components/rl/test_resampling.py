"""Resampling of responses: numbers worked out by hand."""

import math
from typing import Any

import pytest
import torch

from components.rl.resampling import selection_weights
from tests.messages import says


@pytest.mark.parametrize(
    ("rule", "weights"),
    [("pow", [4.0, 0.25, 0.0, 4.0]), ("max_min", [1.0, 0.0, 0.0, 1.0]), ("max_random", [0.4, 0.1, 0.1, 0.1])],
)
def test_resampling_weights_follow_from_rewards(rule: Any, weights: list[float]) -> None:
    actual = selection_weights(torch.tensor([2.0, -0.5, 0.0, -2.0]), rule)
    assert actual.tolist() == pytest.approx(weights, abs=2e-8)
    assert bool((actual > 0).all())


def test_equal_rewards_have_equal_weights_and_nan_raises_an_error() -> None:
    for rule in ("pow", "max_min", "max_random"):
        weights = selection_weights(torch.zeros(3), rule)
        assert weights.tolist() == [weights[0].item()] * 3
    with pytest.raises(ValueError, match=says("finite")):
        selection_weights(torch.tensor([1.0, math.nan]), "pow")
    with pytest.raises(ValueError, match=says("best", "max_min")):
        selection_weights(torch.ones(2), "best")  # pyright: ignore[reportArgumentType] (refused)
