"""KL estimators, and the adaptive KL coefficient. d is log p - log p_ref."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.batch import Batch
from components.rl.kl import KLKind, adapted_kl_coef, kl_estimate
from tests.components.rl.loss_cases import steps
from tests.messages import says

NAN = math.nan
INF = math.inf
KINDS: tuple[KLKind, ...] = get_args(KLKind)
PLAIN: tuple[KLKind, ...] = ("k1", "k2", "k3", "abs")
LN2 = math.log(2.0)


def slow_kl(d: float, kind: str) -> tuple[float, float]:
    """Return the estimate and its derivative with respect to log p."""
    cut_d = max(-20.0, min(20.0, d))
    value, slope = {
        "k1": (cut_d, 1.0),
        "k2": (cut_d * cut_d / 2, cut_d),
        "k3": (math.exp(-cut_d) - 1 + cut_d, 1 - math.exp(-cut_d)),
        "abs": (abs(cut_d), float((cut_d > 0) - (cut_d < 0))),
    }[kind.removesuffix("+")]
    if kind.endswith("+"):
        slope = slow_kl(d, "k2")[1]
    elif abs(value) > 10:
        slope = 0.0
    return max(-10.0, min(10.0, value)), slope


def estimates(d: list[float], kind: KLKind) -> tuple[list[float], list[float]]:
    """Return the estimates for tokens with log-ratios d, and the gradient of their sum."""
    d_N = torch.tensor(d)
    x_N = d_N.clamp(max=0.0).requires_grad_()
    kl_N = kl_estimate(x_N, (-d_N).clamp(max=0.0), torch.ones(len(d)).bool(), kind)
    kl_N.sum().backward()
    assert x_N.grad is not None
    return kl_N.tolist(), x_N.grad.tolist()


@pytest.mark.parametrize(
    ("kind", "values", "slopes"),
    [
        # d = ln 2 and -ln 2: ln(2)^2 / 2 = 0.240227; 1/2 - 1 + ln 2 = 0.193147, 2 - 1 - ln 2 = 0.306853.
        # The derivative of k2 is d, that of k3 is 1 - exp(-d): 1/2 and -1.
        ("k1", [LN2, -LN2], [1.0, 1.0]),
        ("k2", [0.240227, 0.240227], [LN2, -LN2]),
        ("k3", [0.193147, 0.306853], [0.5, -1.0]),
        ("abs", [LN2, LN2], [1.0, -1.0]),
        ("k1+", [LN2, -LN2], [LN2, -LN2]),
        ("k2+", [0.240227, 0.240227], [LN2, -LN2]),
        ("k3+", [0.193147, 0.306853], [LN2, -LN2]),
        ("abs+", [LN2, LN2], [LN2, -LN2]),
    ],
)
def test_kl_estimates_of_ratios_2_and_one_half_equal_a_calculation_by_hand(
    kind: KLKind, values: list[float], slopes: list[float]
) -> None:
    actual = estimates([LN2, -LN2], kind)
    assert actual == (pytest.approx(values, abs=1e-6), pytest.approx(slopes, abs=1e-6))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_have_no_divergence(kind: KLKind) -> None:
    x_N = torch.tensor([-0.1, -7.0])
    assert kl_estimate(x_N, x_N, torch.ones(2).bool(), kind).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_are_unbiased(kind: KLKind) -> None:
    # Over both outcomes weighted by p: KL = 0.5 ln(0.5 / 0.75) + 0.5 ln(0.5 / 0.25) = 0.143841.
    p = torch.tensor([0.5, 0.5])
    q = torch.tensor([0.75, 0.25])
    actual = (p * kl_estimate(p.log(), q.log(), torch.ones(2).bool(), kind)).sum().item()
    assert actual == pytest.approx(0.143841, abs=1e-6)


@pytest.mark.parametrize("kind", ["k2", "k1+", "k2+", "k3+", "abs+"])
def test_k2_and_all_plus_estimators_have_the_expected_gradient_of_the_divergence(kind: KLKind) -> None:
    logits = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    q_log = torch.tensor([0.2, 0.5, 0.3]).log()
    p_log = logits.log_softmax(0)
    (true,) = torch.autograd.grad((p_log.exp() * (p_log - q_log)).sum(), logits, retain_graph=True)
    kl_N = kl_estimate(p_log, q_log, torch.ones(3).bool(), kind)
    (actual,) = torch.autograd.grad((p_log.exp().detach() * kl_N).sum(), logits)
    torch.testing.assert_close(actual, true)


@pytest.mark.parametrize("kind", KINDS)
def test_estimates_are_clipped_at_ten_and_have_no_gradient_beyond(kind: KLKind) -> None:
    lowest = -10.0 if kind in ("k1", "k1+") else 10.0
    assert estimates([1e4, -1e4, INF, -INF], kind) == ([10.0, lowest, 10.0, lowest], [0.0] * 4)


def test_plus_estimators_keep_their_gradient_when_k2_or_the_value_is_clipped() -> None:
    # d = 5: k2 = 12.5 is clipped and has no slope. k1 = 5 and k3 = 4.006738 are not clipped. A plus estimator has the
    # slope d.
    assert estimates([5.0], "k1") == ([5.0], [1.0])
    assert estimates([5.0], "k2") == ([10.0], [0.0])
    assert estimates([5.0], "k1+") == ([5.0], [5.0])
    assert estimates([5.0], "k3+") == ([pytest.approx(4.006738)], [5.0])
    # d = -3: k3 = 16.09 is clipped, and its plus variant keeps its gradient.
    assert estimates([-3.0], "k3+") == ([10.0], [-3.0])
    assert estimates([25.0], "k1+") == ([10.0], [0.0])


@pytest.mark.parametrize("kind", ["k3", "k3+"])
def test_k3_is_precise_close_to_the_reference(kind: KLKind) -> None:
    # d = 1e-3: d^2 / 2 - d^3 / 6 = 4.998334e-07, which exp(-d) - 1 + d would lose in float32.
    assert estimates([1e-3], kind)[0] == pytest.approx([4.998334e-07], rel=1e-3)


@pytest.mark.parametrize("kind", PLAIN)
@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_plus_estimators_have_exactly_the_value_of_the_plain_ones(kind: KLKind, step: Batch) -> None:
    given_N = step["x"], step["old"] / 3, step["mask"]
    plus: KLKind = f"{kind}+"  # pyright: ignore[reportAssignmentType]
    assert torch.equal(kl_estimate(*given_N, plus), kl_estimate(*given_N, kind))


@pytest.mark.parametrize("kind", KINDS)
@given(step=steps())
@settings(max_examples=60, deadline=None)
def test_estimates_agree_with_a_scalar_loop(kind: KLKind, step: Batch) -> None:
    x_N = step["x"].clone().requires_grad_()
    acts_N = step["mask"]
    kl_N = kl_estimate(x_N, step["old"], acts_N, kind)
    kl_N.sum().backward()
    assert x_N.grad is not None
    slow = [slow_kl(d, kind) for d in (step["x"] - step["old"])[acts_N].tolist()]
    assert kl_N[acts_N].tolist() == pytest.approx([value for value, _ in slow], rel=1e-4, abs=1e-5)
    assert x_N.grad[acts_N].tolist() == pytest.approx([slope for _, slope in slow], rel=1e-4, abs=1e-5)
    assert not kl_N[~acts_N].any()
    assert not x_N.grad[~acts_N].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_affects_only_action_tokens(kind: KLKind) -> None:
    x_N = torch.tensor([NAN, -INF, -1.0, NAN], requires_grad=True)
    ref_N = torch.tensor([0.0, -INF, -2.0, -1.0])
    kl_N = kl_estimate(x_N, ref_N, torch.tensor([False, False, True, True]), kind)
    assert kl_N.tolist() == pytest.approx([0.0, 0.0, slow_kl(1.0, kind)[0], NAN], nan_ok=True)
    kl_N[:3].sum().backward()
    assert x_N.grad is not None
    assert x_N.grad.tolist() == pytest.approx([0.0, 0.0, slow_kl(1.0, kind)[1], 0.0])


def test_low_precision_inputs_give_float32() -> None:
    x_N = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert kl_estimate(x_N, x_N, torch.tensor([True]), "k3").dtype == torch.float32


def test_unknown_estimators_and_bad_shapes_raise_an_error() -> None:
    one_N = torch.zeros(2)
    mask_N = torch.ones(2).bool()
    for kind in ("k4", "k1++", "+", ""):
        with pytest.raises(ValueError, match=says(f"'{kind}'", *get_args(KLKind))):
            kl_estimate(one_N, one_N, mask_N, kind)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=says("ref_logprob_N", "[2, 1]", "[2]")):
        kl_estimate(one_N, one_N[:, None], mask_N, "k1")


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        # 100 samples with a horizon of 1000 are a tenth. They multiply the error, which is clipped to a fifth.
        (6.6, 2.0 * (1 + 0.1 * 0.1)),
        (5.7, 2.0 * (1 - 0.05 * 0.1)),
        (6.0, 2.0),
        (60.0, 2.0 * (1 + 0.2 * 0.1)),
        (0.0, 2.0 * (1 - 0.2 * 0.1)),
        (-1.0, 2.0 * (1 - 0.2 * 0.1)),
    ],
)
def test_the_adaptive_kl_coefficient_equals_a_calculation_by_hand(kl: float, expected: float) -> None:
    assert adapted_kl_coef(2.0, kl, target=6.0, horizon=1000, samples=100) == pytest.approx(expected)


def test_the_kl_coefficient_stays_if_it_is_0_or_there_is_no_sample() -> None:
    assert adapted_kl_coef(0.0, 9.0, target=6.0, horizon=10, samples=5) == 0.0
    assert adapted_kl_coef(1.5, 9.0, target=6.0, horizon=10, samples=0) == 1.5
    assert adapted_kl_coef(1.5, 0.0, target=6.0, horizon=10, samples=49) == pytest.approx(0.03)


@given(st.floats(0, 10), st.floats(-20, 20), st.floats(0.01, 10), st.floats(2001, 1e5), st.integers(0, 10000))
@settings(max_examples=100, deadline=None)
def test_the_adaptive_kl_coefficient_agrees_with_the_formula(
    coef: float, kl: float, target: float, horizon: float, samples: int
) -> None:
    error = kl / target - 1
    if abs(error) > 0.2:
        error = math.copysign(0.2, error)
    slow = coef + coef * error * samples / horizon
    actual = adapted_kl_coef(coef, kl, target=target, horizon=horizon, samples=samples)
    assert actual == pytest.approx(slow, abs=1e-9)


@pytest.mark.parametrize("kl", [NAN, INF, -INF])
def test_a_kl_that_is_not_finite_raises_an_error(kl: float) -> None:
    with pytest.raises(ValueError, match=says("KL", kl)):
        adapted_kl_coef(1.0, kl, target=1.0, horizon=1.0, samples=1)
