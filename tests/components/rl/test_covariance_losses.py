"""Clip-Cov and KL-Cov: selection of the tokens that reduce the entropy most, and their losses."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.batch import Batch
from components.rl.covariance_losses import clip_cov_loss, clip_cov_tokens, covariances, kl_cov_loss, kl_cov_tokens
from tests.components.rl.loss_cases import LOSSES, steps
from tests.messages import says

NAN = math.nan
INF = math.inf
LN2 = math.log(2.0)
shares = st.sampled_from([0.0, 2e-3, 0.1, 0.5, 1.0])


def close_to(expected: list[float]) -> object:
    return pytest.approx(expected, rel=1e-4, abs=1e-4)


def covariances_of(step: Batch) -> Tensor:
    return covariances(step["old"], step["advantage"], step["mask"])


def test_covariances_equal_a_calculation_by_hand() -> None:
    # Means -2 and 1 over the three action tokens: (-1 + 2) (4 - 1) = 3, (-2 + 2) (-2 - 1) = 0, (-3 + 2) (1 - 1) = 0.
    old_N = torch.tensor([-1.0, NAN, -2.0, -3.0], requires_grad=True)
    advantage_N = torch.tensor([4.0, INF, -2.0, 1.0], requires_grad=True)
    found_N = covariances(old_N, advantage_N, torch.tensor([True, False, True, True]))
    assert found_N.tolist() == [3.0, 0.0, 0.0, 0.0]
    assert not found_N.requires_grad
    # Means -2 and 3: (1) (-2), (-1) (2).
    assert covariances(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, 5.0]), torch.ones(2).bool()).tolist() == [-2, -2]


@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_covariances_agree_with_a_scalar_loop(step: Batch) -> None:
    mask, old, advantage = (step[name].tolist() for name in ("mask", "old", "advantage"))
    count = max(sum(mask), 1)
    mean_old = sum(x for x, acts in zip(old, mask) if acts) / count
    mean_advantage = sum(x for x, acts in zip(advantage, mask) if acts) / count
    slow = [(p - mean_old) * (a - mean_advantage) if acts else 0.0 for acts, p, a in zip(mask, old, advantage)]
    # A float32 log-probability of -1e4 has a precision of about 1e-3.
    assert covariances_of(step).tolist() == pytest.approx(slow, rel=1e-4, abs=1e-2 if min(old) < -999 else 1e-4)


def test_clip_cov_drops_tokens_within_the_bounds_with_the_smallest_random_numbers() -> None:
    # Action tokens with covariances between 1 and 5: tokens 1, 2 and 5, in the order 5, 1, 2 of their random numbers.
    covariance_N = torch.tensor([0.5, 2.0, 4.0, 9.0, 3.0, 1.5, 1.0, 5.0])
    uniform_N = torch.tensor([0.0, 0.5, 0.9, 0.1, 0.2, 0.3, 0.0, 0.0])
    mask_N = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1]).bool()
    # Seven action tokens: a share of 0.3 selects 2 (rounded down), shares of 0 and 0.1 select one, a share of 1 all
    # candidates.
    for share, expected in [(0.3, [1, 5]), (0.0, [5]), (0.1, [5]), (1.0, [1, 2, 5])]:
        dropped_N = clip_cov_tokens(covariance_N, mask_N, uniform_N, share=share, low=1.0, high=5.0)
        assert dropped_N.nonzero().squeeze(1).tolist() == expected
    assert not clip_cov_tokens(covariance_N, mask_N, uniform_N, share=1.0, low=6.0, high=8.0).any()


def test_kl_cov_penalises_tokens_with_the_largest_covariances() -> None:
    covariance_N = torch.tensor([0.5, 2.0, 4.0, NAN, -3.0, 1.5])
    mask_N = torch.tensor([1, 1, 1, 0, 1, 1]).bool()
    # Five action tokens: a share of 0.5 selects 2, shares of 0 and 0.1 select one.
    for share, expected in [(0.5, [1, 2]), (0.0, [2]), (0.1, [2]), (1.0, [0, 1, 2, 4, 5])]:
        held_N = kl_cov_tokens(covariance_N, mask_N, share=share)
        assert held_N.nonzero().squeeze(1).tolist() == expected


@given(step=steps(), share=shares, seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_selected_tokens_agree_with_a_scalar_loop(step: Batch, share: float, seed: int) -> None:
    covariance_N = covariances_of(step)
    mask_N = step["mask"]
    uniform_N = torch.rand(step.num_tokens, generator=torch.Generator().manual_seed(seed))
    covariance = covariance_N.tolist()
    acting = mask_N.nonzero().squeeze(1).tolist()
    count = max(int(share * len(acting)), 1)
    between = sorted((uniform_N[t].item(), t) for t in acting if 0.1 < covariance[t] < 2.0)
    dropped_N = clip_cov_tokens(covariance_N, mask_N, uniform_N, share=share, low=0.1, high=2.0)
    assert dropped_N.nonzero().squeeze(1).tolist() == sorted(t for _, t in between[:count])
    held_N = kl_cov_tokens(covariance_N, mask_N, share=share)
    assert not (held_N & ~mask_N).any()
    # Of equal covariances any may be selected.
    largest = sorted((covariance[t] for t in acting), reverse=True)[:count]
    assert sorted(covariance_N[held_N].tolist(), reverse=True) == largest


@given(step=steps("usual"), share=shares, seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_selection_does_not_depend_on_the_order_of_sequences_or_environment_tokens(
    step: Batch, share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    step = step.with_tokens(
        old=-torch.rand(step.num_tokens, generator=generator),
        advantage=torch.randn(step.num_tokens, generator=generator),
        uniform=torch.rand(step.num_tokens, generator=generator),
    )

    def choose(of: Batch) -> Batch:
        covariance_N = covariances_of(of)
        mask_N = of["mask"]
        dropped_N = clip_cov_tokens(covariance_N, mask_N, of["uniform"], share=share, low=0.0, high=0.2)
        return of.with_tokens(dropped=dropped_N, held=kl_cov_tokens(covariance_N, mask_N, share=share))

    # The rounding of a sum in another order must not decide between two tokens.
    limits_N = torch.cat([covariances_of(step)[step["mask"]], torch.tensor([0.0, 0.2])]).sort().values
    assume(bool((limits_N.diff() > 1e-5).all()))
    order = torch.randperm(len(step), generator=generator)
    chosen = choose(step)
    moved = choose(step.select(order))
    written = {name: torch.where(step["mask"], step[name], NAN) for name in ("old", "advantage", "uniform")}
    touched = choose(step.with_tokens(**written))
    for name in ("dropped", "held"):
        assert torch.equal(moved[name], chosen.select(order)[name])
        assert torch.equal(touched[name], chosen[name])


def two_tokens(chosen: list[bool], name: str) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Return loss, gradient and metrics for ratios 2 and 1/2 with advantages -1 and 3."""
    x_N = torch.tensor([-LN2, -3 * LN2], requires_grad=True)
    old_N = torch.full((2,), -2 * LN2)
    advantage_N = torch.tensor([-1.0, 3.0])
    mask_N = torch.ones(2).bool()
    chosen_N = torch.tensor(chosen)
    if name == "clip":
        actual = clip_cov_loss(x_N, old_N, advantage_N, mask_N, chosen_N, clip_low=0.2, clip_high=0.2)
    else:
        actual = kl_cov_loss(x_N, old_N, advantage_N, mask_N, chosen_N, coef=0.5)
    actual.loss_N.sum().backward()
    assert x_N.grad is not None
    assert not any(of_N.requires_grad for of_N in actual.metrics.values())
    return actual.loss_N.tolist(), x_N.grad.tolist(), {metric: of_N.tolist() for metric, of_N in actual.metrics.items()}


def test_clip_cov_equals_a_calculation_by_hand() -> None:
    # PPO gives 2 and -3/2. A dropped token has neither loss nor gradient.
    assert two_tokens([False, False], "clip")[:2] == (pytest.approx([2.0, -1.5]), pytest.approx([2.0, -1.5]))
    loss, slope, metrics = two_tokens([True, False], "clip")
    assert (loss, slope) == (pytest.approx([0.0, -1.5]), pytest.approx([0.0, -1.5]))
    assert set(metrics) == {"clip_frac", "ratio_mean", "approx_kl", "dropped_share"}
    assert metrics["dropped_share"] == [1.0, 0.0]


def test_kl_cov_equals_a_calculation_by_hand() -> None:
    # -r A is 2 and -3/2. Penalised tokens have half of ln 2 added, and their slope changes by +1/2 and -1/2.
    assert two_tokens([False, False], "kl")[:2] == (pytest.approx([2.0, -1.5]), pytest.approx([2.0, -1.5]))
    loss, slope, metrics = two_tokens([True, True], "kl")
    assert loss == pytest.approx([2.0 + LN2 / 2, -1.5 + LN2 / 2])
    assert slope == pytest.approx([2.5, -2.0])
    assert metrics["held_share"] == [1.0, 1.0]
    assert metrics["ratio_mean"] == pytest.approx([2.0, 0.5])
    assert metrics["approx_kl"] == pytest.approx([1 - LN2, LN2 - 0.5])


def slow_token(
    name: str, x: float, old: float, advantage: float, chosen: bool
) -> tuple[float, float, dict[str, float]]:
    """Return the loss, its derivative with respect to the log-probability, and metrics."""
    moved = x - old
    inside = abs(moved) <= 20
    d = moved if inside else math.copysign(20.0, moved)
    ratio = math.exp(d)
    metrics = {"ratio_mean": ratio, "approx_kl": ratio - 1 - d}
    if name == "clip_cov":
        clipped = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
        kept = min(max(ratio, 0.8), 1.28) if clipped else ratio
        metrics |= {"clip_frac": float(clipped), "dropped_share": float(chosen)}
        return (
            0.0 if chosen else -kept * advantage,
            0.0 if chosen or clipped or not inside else -ratio * advantage,
            metrics,
        )
    sign = (d > 0) - (d < 0)
    held = 0.5 if chosen else 0.0
    slope = -ratio * advantage + held * sign if inside else 0.0
    return -ratio * advantage + held * abs(d), slope, metrics | {"held_share": float(chosen)}


@pytest.mark.parametrize(("name", "column"), [("clip_cov", "dropped"), ("kl_cov", "held")])
@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_losses_agree_with_a_scalar_loop(name: str, column: str, step: Batch) -> None:
    x_N = step["x"].clone().requires_grad_()
    acts_N = step["mask"]
    actual = LOSSES[name](x_N, step)
    actual.loss_N.sum().backward()
    assert x_N.grad is not None
    tokens = zip(*(step[of][acts_N].tolist() for of in ("x", "old", "advantage", column)))
    slow = [slow_token(name, *token) for token in tokens]
    assert actual.loss_N[acts_N].tolist() == close_to([loss for loss, _, _ in slow])
    assert x_N.grad[acts_N].tolist() == close_to([slope for _, slope, _ in slow])
    for metric, of_N in actual.metrics.items():
        assert of_N[acts_N].tolist() == close_to([of_token[metric] for _, _, of_token in slow]), metric
    assert not actual.loss_N[~acts_N].any()
    assert not x_N.grad[~acts_N].any()


def test_clip_cov_without_dropped_tokens_is_ppo_and_kl_cov_never_clips() -> None:
    step = Batch(
        [2, 1],
        {
            "old": torch.tensor([-1.0, -2.0, -0.5]),
            "advantage": torch.tensor([1.0, -1.0, 0.5]),
            "mask": torch.tensor([True, True, False]),
        },
    )
    x_N = torch.tensor([-0.2, -2.5, -3.0])
    none_N = torch.zeros(3).bool()
    step = step.with_tokens(dropped=none_N, held=none_N)
    assert torch.equal(LOSSES["clip_cov"](x_N, step).loss_N, LOSSES["ppo"](x_N, step).loss_N)
    assert LOSSES["kl_cov"](x_N, step).loss_N.tolist() == pytest.approx([-math.exp(0.8), math.exp(-0.5), 0.0])


@pytest.mark.parametrize("size", [0, 3])
def test_without_action_tokens_nothing_is_selected(size: int) -> None:
    nan_N = torch.full((size,), NAN)
    mask_N = torch.zeros(size).bool()
    assert covariances(nan_N, nan_N, mask_N).tolist() == [0.0] * size
    assert not clip_cov_tokens(nan_N, mask_N, nan_N, share=1.0, low=-1.0, high=1.0).any()
    assert not kl_cov_tokens(nan_N, mask_N, share=1.0).any()


def test_a_nan_of_an_action_token_is_returned_by_the_covariances() -> None:
    found_N = covariances(torch.tensor([NAN, -1.0]), torch.ones(2), torch.ones(2).bool())
    # Their mean is over the whole step, so a change affects all tokens.
    assert found_N.isnan().all()


def test_bad_arguments_raise_an_error() -> None:
    one_N = torch.ones(2)
    mask_N = torch.ones(2).bool()
    for share in (-0.1, 1.5, NAN):
        with pytest.raises(ValueError, match=says(f"share={share}")):
            clip_cov_tokens(one_N, mask_N, one_N, share=share, low=0.0, high=1.0)
        with pytest.raises(ValueError, match=says(f"share={share}")):
            kl_cov_tokens(one_N, mask_N, share=share)
    for coef in (-1.0, NAN):
        with pytest.raises(ValueError, match=says(f"coef={coef}")):
            kl_cov_loss(one_N, one_N, one_N, mask_N, mask_N, coef=coef)
    for wrong_N, facts in ((one_N, ["bool", "torch.float32"]), (mask_N[:1], ["action_mask_N", "[2]", "[1]"])):
        with pytest.raises(ValueError, match=says(*facts)):
            clip_cov_loss(one_N, one_N, one_N, mask_N, wrong_N, clip_low=0.2, clip_high=0.2)
        with pytest.raises(ValueError, match=says(*facts)):
            kl_cov_loss(one_N, one_N, one_N, mask_N, wrong_N, coef=1.0)
    with pytest.raises(ValueError, match=says("uniform_N", "[2, 1]", "[2]")):
        clip_cov_tokens(one_N, mask_N, one_N[:, None], share=0.1, low=0.0, high=1.0)
    with pytest.raises(ValueError, match=says("advantage_N", "[1]", "[2]")):
        covariances(one_N, one_N[:1], mask_N)


def test_a_nan_is_not_dropped() -> None:
    columns = (torch.tensor([math.nan, -3.0]), torch.full((2,), -3.0), torch.ones(2), torch.ones(2).bool())
    actual = clip_cov_loss(*columns, torch.tensor([True, True]), clip_low=0.2, clip_high=0.2)
    assert actual.loss_N[0].isnan()
    assert actual.loss_N[1] == 0
