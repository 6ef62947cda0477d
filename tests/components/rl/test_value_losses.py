"""The clipped value loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rl.value_losses import clipped_value_loss

Token = tuple[bool, float, float, float]  # acts, value now, before, return


def slow_value_loss(tokens: list[Token], total: float, clip: float) -> float:
    loss = 0.0
    for acts, value, old, target in tokens:
        if acts:
            kept = old + max(-clip, min(clip, value - old))
            loss += 0.5 * max((value - target) ** 2, (kept - target) ** 2) / total
    return loss


def test_three_tokens_by_hand() -> None:
    # Old values 0, clip 0.5.  1 -> kept 0.5; return 2: max(1, 2.25) = 2.25.  Return 0: max(1, 0.25) = 1.
    # 0.25 stays; return 0.5: 0.0625.  Half of 3.3125, over 4 tokens: 0.4140625.
    out = clipped_value_loss(
        torch.tensor([1.0, 1.0, 0.25]), torch.zeros(3), torch.tensor([2.0, 0.0, 0.5]), torch.ones(3).bool(), 4, 0.5
    )
    assert out.loss.item() == 0.4140625
    assert {name: x.item() for name, x in out.metrics.items()} == {
        "value_loss": 0.4140625,
        "clipped_share": 0.25,
        "value_mean": 0.5625,
        "return_mean": 0.625,
    }


def test_a_value_that_has_moved_far_enough_gets_no_gradient() -> None:
    value_N = torch.tensor([1.0, 1.0, 0.25], requires_grad=True)
    target_N = torch.tensor([2.0, 0.0, 0.5])
    clipped_value_loss(value_N, torch.zeros(3), target_N, torch.ones(3).bool(), 1, 0.5).loss.backward()
    assert value_N.grad is not None
    assert value_N.grad.tolist() == [0.0, 1.0, -0.25]


def test_without_a_limit_it_is_half_the_squared_error() -> None:
    out = clipped_value_loss(
        torch.tensor([3.0]), torch.zeros(1), torch.tensor([1.0]), torch.ones(1).bool(), 1, math.inf
    )
    assert out.loss.item() == 2.0


def test_a_nan_outside_the_mask_reaches_neither_loss_nor_gradient() -> None:
    nan, inf = float("nan"), float("inf")
    value_N = torch.tensor([nan, inf, 1.0], requires_grad=True)
    mask_N = torch.tensor([False, False, True])
    out = clipped_value_loss(value_N, torch.tensor([nan, inf, 1.0]), torch.tensor([nan, inf, 2.0]), mask_N, 1, 0.5)
    out.loss.backward()
    assert out.loss == 0.5
    assert value_N.grad is not None
    assert value_N.grad.tolist() == [0.0, 0.0, -1.0]


@given(
    st.lists(st.tuples(st.booleans(), st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=10),
    st.floats(0.01, 3),
    st.integers(0, 10),
)
@settings(max_examples=100, deadline=None)
def test_the_loss_agrees_with_a_scalar_loop_however_it_is_cut(tokens: list[Token], clip: float, cut: int) -> None:
    found = 0.0
    for part in filter(None, (tokens[:cut], tokens[cut:])):
        mask, *floats = zip(*part)
        value_N, old_N, return_N = (torch.tensor(column) for column in floats)
        found += clipped_value_loss(value_N, old_N, return_N, torch.tensor(mask), 7, clip).loss.item()
    assert found == pytest.approx(slow_value_loss(tokens, 7, clip), rel=1e-4, abs=1e-5)


def test_a_clip_that_lets_nothing_move_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="clip=0: no value could move"):
        clipped_value_loss(one, one, one, one.bool(), 1, 0)
