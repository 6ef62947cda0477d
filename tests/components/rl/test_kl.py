"""KL estimators. d is log p - log p_ref."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rl.kl import KLKind, kl_estimate

KINDS: tuple[KLKind, ...] = ("k1", "k2", "k3")


def slow_kl(logprob: float, ref_logprob: float, kind: str) -> float:
    d = logprob - ref_logprob
    estimate = {"k1": lambda: d, "k2": lambda: d * d / 2, "k3": lambda: math.exp(-d) - 1 + d}[kind]()
    return max(-10.0, min(10.0, estimate))


def test_a_token_twice_as_likely_as_under_the_reference() -> None:
    # d = ln 2 = 0.693147; d^2 / 2 = 0.240227; 1/2 - 1 + 0.693147 = 0.193147.
    logprob_N, ref_logprob_N = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    found = [kl_estimate(logprob_N, ref_logprob_N, kind).item() for kind in KINDS]
    assert found == pytest.approx([0.693147, 0.240227, 0.193147], abs=1e-6)


def test_equal_distributions_have_no_divergence() -> None:
    logprob_N = torch.tensor([-0.1, -7.0])
    for kind in KINDS:
        assert kl_estimate(logprob_N, logprob_N, kind).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_without_bias(kind: KLKind) -> None:
    # Over both outcomes weighted by p: KL = 0.5 ln(0.5 / 0.75) + 0.5 ln(0.5 / 0.25) = 0.143841.
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25])
    assert (p * kl_estimate(p.log(), q.log(), kind)).sum().item() == pytest.approx(0.143841, abs=1e-6)


def test_the_expected_gradient_of_k2_is_that_of_the_divergence() -> None:
    logits = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    q_log = torch.tensor([0.2, 0.5, 0.3]).log()
    p_log = logits.log_softmax(0)
    (true,) = torch.autograd.grad((p_log.exp() * (p_log - q_log)).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((p_log.exp().detach() * kl_estimate(p_log, q_log, "k2")).sum(), logits)
    torch.testing.assert_close(found, true)


def test_estimates_are_cut_at_ten_and_their_gradient_stays_finite() -> None:
    expected = {"k1": [10.0, -10.0], "k2": [10.0, 10.0], "k3": [10.0, 10.0]}
    for kind in KINDS:
        logprob_N = torch.tensor([0.0, -1000.0], requires_grad=True)
        kl_N = kl_estimate(logprob_N, torch.tensor([-1000.0, 0.0]), kind)
        kl_N.sum().backward()
        assert kl_N.tolist() == expected[kind]
        assert logprob_N.grad is not None
        assert logprob_N.grad.tolist() == [0.0, 0.0]


def test_k3_keeps_its_digits_close_to_the_reference() -> None:
    # d = 1e-3: d^2 / 2 - d^3 / 6 = 4.998334e-07, which float32 would lose in exp(-d) - 1 + d.
    found = kl_estimate(torch.tensor([1e-3]), torch.tensor([0.0]), "k3").item()
    assert found == pytest.approx(4.998334e-07, rel=1e-3)


def test_low_precision_comes_out_as_float32() -> None:
    logprob_N = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert kl_estimate(logprob_N, logprob_N, "k3").dtype == torch.float32


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=8), st.sampled_from(KINDS))
@settings(max_examples=100, deadline=None)
def test_estimates_agree_with_a_scalar_loop(pairs: list[tuple[float, float]], kind: KLKind) -> None:
    logprob_N, ref_logprob_N = torch.tensor(pairs, dtype=torch.float32).unbind(1)
    found = kl_estimate(logprob_N, ref_logprob_N, kind).tolist()
    slow = [slow_kl(a, b, kind) for a, b in zip(logprob_N.tolist(), ref_logprob_N.tolist())]
    assert found == pytest.approx(slow, rel=1e-4, abs=1e-5)


def test_an_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'k4' is unknown; set one of k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # pyright: ignore[reportArgumentType]


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logprob_N has shape \[2\], ref_logprob_N \[2, 1\]"):
        kl_estimate(torch.zeros(2), torch.zeros(2, 1), "k1")
