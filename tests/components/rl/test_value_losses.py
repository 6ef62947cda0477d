"""Clipped value loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.batch import Batch
from components.rl.value_losses import clipped_value_loss
from tests.components.rl.loss_cases import steps
from tests.messages import says

NAN = math.nan
INF = math.inf


def slow_token(value: float, old: float, target: float, clip: float) -> tuple[float, float, dict[str, float]]:
    """Return the loss, its derivative with respect to the value, and metrics."""
    kept = old + max(-clip, min(clip, value - old))
    square = (value - target) ** 2
    kept_square = (kept - target) ** 2
    moves = abs(value - old) <= clip
    # If both squares are equal, each has half of the gradient of the maximum, and the clipped value has none beyond the
    # limit.
    slope = 0.0
    if square > kept_square or moves:
        slope = 1.0
    elif square == kept_square:
        slope = 0.5
    metrics = {"clip_frac": float(kept_square > square), "value_mean": value, "return_mean": target}
    return 0.5 * max(square, kept_square), slope * (value - target), metrics


def test_the_value_loss_of_three_tokens_equals_a_calculation_by_hand() -> None:
    # Old values 0, clip range 0.5. Value 1 is clipped to 0.5. Return 2: max(1, 2.25) = 2.25. Return 0: max(1, 0.25) =
    # 1. Value 0.25 is not clipped. Return 0.5: 0.0625. The loss is half of each. A selected clipped value has no
    # gradient.
    value_N = torch.tensor([1.0, 1.0, 0.25], requires_grad=True)
    return_N = torch.tensor([2.0, 0.0, 0.5], requires_grad=True)
    old_N = torch.zeros(3, requires_grad=True)
    actual = clipped_value_loss(value_N, old_N, return_N, torch.ones(3).bool(), clip=0.5)
    actual.loss_N.sum().backward()
    assert actual.loss_N.tolist() == [1.125, 0.5, 0.03125]
    assert {name: of_N.tolist() for name, of_N in actual.metrics.items()} == {
        "clip_frac": [1.0, 0.0, 0.0],
        "value_mean": [1.0, 1.0, 0.25],
        "return_mean": [2.0, 0.0, 0.5],
    }
    assert value_N.grad is not None
    assert value_N.grad.tolist() == [0.0, 1.0, -0.25]
    assert old_N.grad is None
    assert return_N.grad is None
    assert not any(of_N.requires_grad for of_N in actual.metrics.values())


def test_without_clipping_the_value_loss_is_half_the_squared_error() -> None:
    one = torch.tensor([1.0])
    actual = clipped_value_loss(torch.tensor([3.0]), torch.zeros(1), one, one.bool(), clip=INF)
    assert actual.loss_N.tolist() == [2.0]
    assert actual.metrics["clip_frac"].tolist() == [0.0]


def test_rounding_does_not_count_as_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    value_N = torch.randn(1000, generator=generator)
    return_N = torch.randn(1000, generator=generator)
    old_N = value_N + torch.rand(1000, generator=generator) - 0.5
    actual = clipped_value_loss(value_N, old_N, return_N, torch.ones(1000).bool(), clip=0.6)
    assert not actual.metrics["clip_frac"].any()


@given(step=steps(), clip=st.sampled_from([0.03, 0.7, 3.0, INF]))
@settings(max_examples=100, deadline=None)
def test_the_loss_agrees_with_a_scalar_loop(step: Batch, clip: float) -> None:
    value_N = step["x"].clone().requires_grad_()
    acts_N = step["mask"]
    actual = clipped_value_loss(value_N, step["old"], step["advantage"], acts_N, clip=clip)
    actual.loss_N.sum().backward()
    assert value_N.grad is not None
    tokens = zip(*(step[name][acts_N].tolist() for name in ("x", "old", "advantage")))
    slow = [slow_token(value, old, target, clip) for value, old, target in tokens]
    assert actual.loss_N[acts_N].tolist() == pytest.approx([loss for loss, _, _ in slow], rel=1e-4, abs=1e-5)
    assert value_N.grad[acts_N].tolist() == pytest.approx([slope for _, slope, _ in slow], rel=1e-4, abs=1e-5)
    for name, of_N in actual.metrics.items():
        assert of_N[acts_N].tolist() == pytest.approx([of_token[name] for _, _, of_token in slow]), name
    assert not actual.loss_N[~acts_N].any()
    assert not value_N.grad[~acts_N].any()


def test_a_nan_affects_only_action_tokens() -> None:
    value_N = torch.tensor([NAN, INF, 1.0], requires_grad=True)
    other_N = torch.tensor([NAN, INF, 2.0])
    mask_N = torch.tensor([False, False, True])
    actual = clipped_value_loss(value_N, other_N, other_N, mask_N, clip=2.0)
    actual.loss_N.sum().backward()
    assert actual.loss_N.tolist() == [0.0, 0.0, 0.5]
    assert value_N.grad is not None
    assert value_N.grad.tolist() == [0.0, 0.0, -1.0]
    for place in range(3):
        a_N, b_N, c_N = (torch.tensor([1.0, NAN]) if i == place else torch.ones(2) for i in range(3))
        actual = clipped_value_loss(a_N, b_N, c_N, torch.ones(2).bool(), clip=0.5)
        assert actual.loss_N.tolist() == pytest.approx([0.0, NAN], nan_ok=True)


def test_bad_arguments_raise_an_error() -> None:
    one = torch.ones(1)
    for clip in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match=says(f"clip={clip}")):
            clipped_value_loss(one, one, one, one.bool(), clip=clip)
    with pytest.raises(ValueError, match=says("return_N", "[2]", "[1]")):
        clipped_value_loss(one, one, torch.ones(2), one.bool(), clip=1.0)
    with pytest.raises(ValueError, match=says("mask", "bool", "torch.float32")):
        clipped_value_loss(one, one, one, one, clip=1.0)
