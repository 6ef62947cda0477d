"""components/rl/distillation.py: values by hand, gradients in expectation, and what coarsening may change."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from components.rl.distillation import FLOOR, Divergence, divergence, with_tail
from tests.messages import says


def distributions(vocabulary: int = 50) -> tuple[Tensor, Tensor]:
    """Return logits of a student, with gradient, and log-probabilities of a teacher, both [1, V] float64."""
    generator = torch.Generator().manual_seed(0)
    student_1V = torch.randn(1, vocabulary, dtype=torch.float64, generator=generator).requires_grad_()
    teacher_1V = torch.randn(1, vocabulary, dtype=torch.float64, generator=generator).log_softmax(-1)
    return student_1V, teacher_1V


def test_divergences_of_two_tokens_equal_a_calculation_by_hand() -> None:
    # p = (.5, .5), q = (.8, .2), of which one token is listed; the other one is the tail.
    student_11, teacher_11 = torch.tensor([[0.5]]).log(), torch.tensor([[0.8]]).log()
    reverse = 0.5 * torch.tensor(0.5 / 0.8).log() + 0.5 * torch.tensor(0.5 / 0.2).log()
    forward = 0.8 * torch.tensor(0.8 / 0.5).log() + 0.2 * torch.tensor(0.2 / 0.5).log()
    # m = (.65, .35)
    jsd = 0.5 * (0.8 * torch.tensor(0.8 / 0.65).log() + 0.2 * torch.tensor(0.2 / 0.35).log())
    jsd += 0.5 * (0.5 * torch.tensor(0.5 / 0.65).log() + 0.5 * torch.tensor(0.5 / 0.35).log())
    expected_by_kind: dict[Divergence, Tensor] = {"reverse": reverse, "forward": forward, "jsd": jsd}
    for kind, expected in expected_by_kind.items():
        torch.testing.assert_close(divergence(student_11, teacher_11, kind), expected[None])


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("count", [4, 16, 49])
def test_a_divergence_is_at_least_0_and_at_most_that_of_the_whole_vocabulary(kind: Divergence, count: int) -> None:
    student_1V, teacher_1V = distributions()
    student_1V = student_1V.log_softmax(-1)
    ids = teacher_1V.topk(count).indices
    coarse = divergence(student_1V.gather(1, ids), teacher_1V.gather(1, ids), kind)
    p, q = student_1V.exp(), teacher_1V.exp()
    m = (p + q) / 2
    whole = {
        "reverse": (p * (p / q).log()).sum(),
        "forward": (q * (q / p).log()).sum(),
        "jsd": ((q * (q / m).log()).sum() + (p * (p / m).log()).sum()) / 2,
    }[kind]
    assert 0 < coarse.item() <= whole.item() + 1e-5
    # All tokens but one, and the tail, are the whole distribution.
    if count == 49:
        assert coarse.item() == pytest.approx(whole.item(), rel=1e-5)
    same = divergence(teacher_1V.gather(1, ids), teacher_1V.gather(1, ids), kind)
    assert same.item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_the_gradient_over_all_tokens_is_that_of_the_exact_kl(kind: Divergence) -> None:
    student_1V, teacher_1V = distributions()
    p_log = student_1V.log_softmax(-1)
    exact = (p_log.exp() * (p_log - teacher_1V)).sum() if kind == "reverse" else -(teacher_1V.exp() * p_log).sum()
    (expected,) = torch.autograd.grad(exact, student_1V)
    ids = torch.arange(49)[None]
    listed = divergence(student_1V.log_softmax(-1).gather(1, ids), teacher_1V.gather(1, ids), kind)
    (actual,) = torch.autograd.grad(listed.sum(), student_1V)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_the_policy_gradient_is_the_reverse_kl_in_expectation_and_k1_is_0() -> None:
    student_1V, teacher_1V = distributions()
    p_log = student_1V.log_softmax(-1)
    p = p_log.detach().exp()
    d = p_log - teacher_1V
    reverse = (p_log.exp() * d).sum()
    # The expectation over the sampled token is taken exactly: a sum over the vocabulary, weighted by p.
    policy_gradient = (p * p_log * d.detach()).sum()
    baseline = (p * p_log * (d.detach() - reverse.detach())).sum()
    k1 = (p * d).sum()
    (expected,) = torch.autograd.grad(reverse, student_1V, retain_graph=True)
    for loss in (policy_gradient, baseline):
        (actual,) = torch.autograd.grad(loss, student_1V, retain_graph=True)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    (nothing,) = torch.autograd.grad(k1, student_1V)
    assert nothing.abs().max() < 1e-12


def test_a_token_without_probability_has_a_finite_divergence_and_gradient() -> None:
    student_12 = torch.tensor([[0.7, 0.2]]).log().requires_grad_()
    teacher_12 = torch.tensor([[1.0, 0.0]]).log()
    assert with_tail(teacher_12).min() >= FLOOR
    result = divergence(student_12, teacher_12, "reverse")
    result.sum().backward()
    assert result.isfinite().all()
    assert student_12.grad is not None
    assert student_12.grad.isfinite().all()


def test_wrong_shapes_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match=says("[2, 3]", "[2, 4]")):
        divergence(torch.zeros(2, 3), torch.zeros(2, 4), "reverse")
    with pytest.raises(ValueError, match=says("k1", "reverse, forward, jsd")):
        divergence(torch.zeros(2, 3), torch.zeros(2, 3), cast(Any, "k1"))
