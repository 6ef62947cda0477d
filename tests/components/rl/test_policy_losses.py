"""The clipped surrogate, and means over tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rl.masked import token_mean
from components.rl.policy_losses import ppo_loss

Token = tuple[bool, float, float, float]  # acts, log-probability now, before, advantage
tokens_of = st.lists(
    st.tuples(st.booleans(), st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2)), min_size=1, max_size=10
)


def slow_ppo(tokens: list[Token], total: float, low: float, high: float) -> tuple[float, float]:
    loss = kl = 0.0
    for acts, logprob, old, advantage in tokens:
        if acts:
            ratio = math.exp(max(-20.0, min(20.0, logprob - old)))
            gain = ratio * advantage
            kept = max(1 - low, min(1 + high, ratio)) * advantage
            loss -= min(gain, kept) / total
            kl += (ratio - 1 - (logprob - old)) / total
    return loss, kl


def of_ratios(ratios: list[float], advantages: list[float], low: float = 0.2, high: float = 0.2) -> dict[str, float]:
    ratio_N = torch.tensor(ratios)
    out = ppo_loss(
        ratio_N.log(),
        torch.zeros_like(ratio_N),
        torch.tensor(advantages),
        torch.ones_like(ratio_N).bool(),
        len(ratios),
        low,
        high,
    )
    return {"loss": out.loss.item()} | {name: x.item() for name, x in out.metrics.items()}


def test_gains_beyond_the_clip_range_do_not_count_and_losses_do() -> None:
    # Gains: min(1.5, 1.2) = 1.2, min(0.5, 0.8) = 0.5, min(-0.5, -0.8) = -0.8, min(-1.5, -1.2) = -1.5: mean -0.15.
    # approx_kl: (0.5 - ln 1.5) = 0.094535 twice, (-0.5 + ln 2) = 0.193147 twice: mean 0.143841.
    found = of_ratios([1.5, 0.5, 0.5, 1.5], [1.0, 1.0, -1.0, -1.0])
    assert found == pytest.approx(
        {"loss": 0.15, "policy_loss": 0.15, "clipped_share": 0.5, "ratio_mean": 1.0, "approx_kl": 0.143841}, abs=1e-6
    )


def test_the_upper_bound_can_be_raised_alone() -> None:
    assert of_ratios([1.5], [1.0], low=0.2, high=0.25)["loss"] == pytest.approx(-1.25)
    assert of_ratios([0.5], [-1.0], low=0.2, high=0.25)["loss"] == pytest.approx(0.8)


def test_at_the_first_update_the_gradient_is_that_of_reinforce() -> None:
    logprob_N = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantage_N = torch.tensor([2.0, -1.0, 4.0])
    out = ppo_loss(logprob_N, logprob_N.detach(), advantage_N, torch.ones(3).bool(), 4, 0.2, 0.2)
    out.loss.backward()
    assert logprob_N.grad is not None
    assert logprob_N.grad.tolist() == [-0.5, 0.25, -1.0]
    assert out.metrics["approx_kl"] == 0.0
    assert not any(x.requires_grad for x in out.metrics.values())


def test_a_clipped_token_has_no_gradient() -> None:
    logprob_N = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    ppo_loss(logprob_N, torch.zeros(2), torch.ones(2), torch.ones(2).bool(), 1, 0.2, 0.2).loss.backward()
    assert logprob_N.grad is not None
    assert logprob_N.grad.tolist() == pytest.approx([0.0, -1.1])


def test_a_nan_outside_the_mask_reaches_neither_loss_nor_gradient() -> None:
    nan, inf = float("nan"), float("inf")
    logprob_N = torch.tensor([nan, -inf, -1.0], requires_grad=True)
    old_N, advantage_N = torch.tensor([0.0, -inf, -1.0]), torch.tensor([nan, inf, 3.0])
    out = ppo_loss(logprob_N, old_N, advantage_N, torch.tensor([False, False, True]), 1, 0.2, 0.2)
    out.loss.backward()
    assert out.loss == -3.0
    assert all(x.isfinite() for x in out.metrics.values())
    assert logprob_N.grad is not None
    assert logprob_N.grad.tolist() == [0.0, 0.0, -3.0]


def test_a_huge_ratio_stays_finite() -> None:
    logprob_N = torch.tensor([500.0], requires_grad=True)
    out = ppo_loss(logprob_N, torch.zeros(1), -torch.ones(1), torch.ones(1).bool(), 1, 0.2, 0.2)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(math.exp(20.0))
    assert logprob_N.grad is not None
    assert logprob_N.grad.isfinite().all()


@given(tokens_of, st.floats(0, 0.9), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_the_loss_agrees_with_a_scalar_loop(tokens: list[Token], low: float, high: float) -> None:
    mask, *floats = zip(*tokens)
    logprob_N, old_N, advantage_N = (torch.tensor(column) for column in floats)
    out = ppo_loss(logprob_N, old_N, advantage_N, torch.tensor(mask), 7, low, high)
    loss, kl = slow_ppo(tokens, 7, low, high)
    assert out.loss.item() == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert out.metrics["approx_kl"].item() == pytest.approx(kl, rel=1e-4, abs=1e-5)


@given(tokens_of, st.integers(0, 10))
@settings(max_examples=60, deadline=None)
def test_where_micro_batches_are_cut_changes_nothing(tokens: list[Token], cut: int) -> None:
    def run(parts: list[list[Token]]) -> tuple[list[float], list[float]]:
        total = sum(acts for part in parts for acts, *_ in part) or 1
        totals, gradient = [0.0] * 5, []
        for part in filter(None, parts):
            mask, *floats = zip(*part)
            logprob_N, old_N, advantage_N = (torch.tensor(column) for column in floats)
            logprob_N.requires_grad_()
            out = ppo_loss(logprob_N, old_N, advantage_N, torch.tensor(mask), total, 0.2, 0.2)
            out.loss.backward()
            assert logprob_N.grad is not None
            gradient += logprob_N.grad.tolist()
            totals = [a + b.item() for a, b in zip(totals, [out.loss, *out.metrics.values()])]
        return totals, gradient

    whole, cut_up = run([tokens]), run([tokens[:cut], tokens[cut:]])
    assert cut_up[0] == pytest.approx(whole[0], rel=1e-4, abs=1e-5)
    assert cut_up[1] == pytest.approx(whole[1])


def test_clip_bounds_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"clip_low=1\.5, clip_high=0\.2; set 0 <= clip_low <= 1"):
        of_ratios([1.0], [1.0], low=1.5)
    with pytest.raises(ValueError, match=r"clip_high=-0\.1"):
        of_ratios([1.0], [1.0], high=-0.1)


def test_a_token_mean_divides_by_the_count_that_is_given() -> None:
    x_N = torch.tensor([1.0, float("nan"), 5.0])
    assert token_mean(x_N, torch.tensor([True, False, True]), 4).item() == 1.5
    assert token_mean(torch.tensor([True, True]), torch.tensor([True, False]), 4).item() == 0.25
    assert token_mean(x_N, torch.zeros(3).bool(), 4).item() == 0.0


def test_a_token_mean_refuses_what_would_go_wrong_unseen() -> None:
    mask_N = torch.ones(2).bool()
    with pytest.raises(ValueError, match=r"x_N has shape \[2, 1\], the mask \[2\]"):
        token_mean(torch.ones(2, 1), mask_N, 2)
    with pytest.raises(ValueError, match=r"the mask must be a bool \[N\], but is torch.int64"):
        token_mean(torch.ones(2), mask_N.long(), 2)
    with pytest.raises(ValueError, match="total_tokens=0: a step that trains on no token"):
        token_mean(torch.ones(2), mask_N, 0)
