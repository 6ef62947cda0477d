"""Losses of pairs: numbers worked out by hand, comparison with slow loops, and invariances. P pairs."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.rl.aggregation import LossOutput
from components.rl.preference_losses import bradley_terry_loss, dpo_loss, kto_kl, kto_loss, orpo_loss, simpo_loss
from tests.messages import says

LN = math.log
Rows = list[tuple[float, float, float, float]]
"""Four numbers for each pair: chosen, rejected, and the margin or the two numbers of the reference."""


def values(output: LossOutput) -> dict[str, float]:
    """Return the loss and its metrics, rounded so that they can be compared with fractions."""
    return {name: round(x.item(), 6) for name, x in {"loss": output.loss, **output.metrics}.items()}


def test_bradley_terry_equals_a_calculation_by_hand() -> None:
    # Gaps ln 3, 0, -ln 3: sigmoid of them 3/4, 1/2, 1/4. A tie counts as half correct.
    chosen_P = torch.tensor([LN(3), 1.0, 0.0])
    rejected_P = torch.tensor([0.0, 1.0, LN(3)])
    assert values(bradley_terry_loss(chosen_P, rejected_P, 3)) == {
        "loss": round(-(LN(3 / 4) + LN(1 / 2) + LN(1 / 4)) / 3, 6),
        "accuracy": 0.5,
        "chosen_reward": round((LN(3) + 1) / 3, 6),
        "rejected_reward": round((1 + LN(3)) / 3, 6),
        "margin": 0.0,
    }


def test_a_margin_is_subtracted_from_the_score_difference_in_the_loss_only() -> None:
    # A gap of ln 6 minus a margin of ln 2 is ln 3: 3/4. A gap of ln 4 without a margin: 4/5.
    chosen_P = torch.tensor([LN(6), 0.0])
    rejected_P = torch.tensor([0.0, -LN(4)])
    margin_P = torch.tensor([LN(2), 0.0])
    with_margin = values(bradley_terry_loss(chosen_P, rejected_P, 2, margin_P))
    without = values(bradley_terry_loss(chosen_P, rejected_P, 2))
    assert with_margin["loss"] == round(-(LN(3 / 4) + LN(4 / 5)) / 2, 6)
    assert without["loss"] == round(-(LN(6 / 7) + LN(4 / 5)) / 2, 6)
    assert with_margin | {"loss": 0} == without | {"loss": 0}
    assert with_margin["accuracy"] == 1.0
    # A pair whose gap is smaller than its margin counts as correct, because accuracy ignores the margin.
    assert values(bradley_terry_loss(torch.tensor([1.0]), torch.tensor([0.0]), 1, torch.tensor([5.0])))["accuracy"] == 1


# One pair: the responses have log-probabilities -1 and -2, and under the reference -1.5 and -1. The log-ratios are 0.5
# and -1, and the gap z is 1.5.
HAND = (torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([-1.5]), torch.tensor([-1.0]))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpo_equals_a_calculation_by_hand() -> None:
    # beta = 2: -log sigmoid(3); implicit rewards 2 * 0.5 = 1 and 2 * -1 = -2.
    assert values(dpo_loss(*HAND, 1, beta=2.0)) == {
        "loss": round(LN(1 + math.exp(-3)), 6),
        "accuracy": 1.0,
        "chosen_reward": 1.0,
        "rejected_reward": -2.0,
        "margin": 3.0,
    }


def test_conservative_dpo_assumes_a_share_of_wrong_labels() -> None:
    # 9/10 of -log sigmoid(3), and 1/10 of -log sigmoid(-3), which is 3 more.
    smoothed = values(dpo_loss(*HAND, 1, beta=2.0, label_smoothing=0.1))
    plain = values(dpo_loss(*HAND, 1, beta=2.0))
    assert smoothed["loss"] == round(LN(1 + math.exp(-3)) + 0.3, 6)
    assert smoothed | {"loss": 0} == plain | {"loss": 0}


def test_ipo_has_its_minimum_at_a_gap_of_one_over_two_beta() -> None:
    # (1.5 - 1 / (2 * 2))^2 = 1.25^2
    assert values(dpo_loss(*HAND, 1, beta=2.0, ipo=True))["loss"] == 1.5625
    # With beta = 1/3 the target gap is 1.5: no loss, no gradient.
    chosen_P = torch.tensor([-1.0], requires_grad=True)
    output = dpo_loss(chosen_P, *HAND[1:], 1, beta=1 / 3, ipo=True)
    output.loss.backward()
    assert chosen_P.grad is not None
    assert (output.loss.item(), chosen_P.grad.item()) == pytest.approx((0, 0), abs=1e-6)


def test_a_policy_equal_to_its_reference_has_accuracy_one_half_and_gradient_half_beta() -> None:
    both = [torch.tensor([-1.0, -3.0], requires_grad=True) for _ in range(2)]
    output = dpo_loss(*both, *(x_P.detach() for x_P in both), total_pairs=2, beta=0.5)
    assert values(output) == {
        "loss": round(LN(2), 6),
        "accuracy": 0.5,
        "chosen_reward": 0.0,
        "rejected_reward": 0.0,
        "margin": 0.0,
    }
    output.loss.backward()
    # beta * sigmoid(0), over two pairs.
    assert [x_P.grad.tolist() for x_P in both if x_P.grad is not None] == [[-0.125] * 2, [0.125] * 2]


def win(chosen: float, rejected: float) -> float:
    """Return 1 for a pair that is ranked correctly, and 0.5 for a tie."""
    return ((chosen > rejected) + (chosen >= rejected)) / 2


def slow_bradley_terry(rows: Rows, total: float) -> dict[str, float]:
    """Return loss and metrics, computed by a loop over pairs."""
    loss = 0.0
    accuracy = 0.0
    for chosen, rejected, margin, _ in rows:
        loss -= math.log(sigmoid(chosen - rejected - margin)) / total
        accuracy += win(chosen, rejected) / total
    return {"loss": loss, "accuracy": accuracy}


def slow_dpo(rows: Rows, total: float, beta: float, smoothing: float, ipo: bool) -> dict[str, float]:
    """Return loss and metrics, computed by a loop over pairs."""
    values = {"loss": 0.0, "accuracy": 0.0, "chosen_reward": 0.0, "rejected_reward": 0.0, "margin": 0.0}
    for chosen, rejected, reference_chosen, reference_rejected in rows:
        better = beta * (chosen - reference_chosen)
        worse = beta * (rejected - reference_rejected)
        if ipo:
            values["loss"] += ((better - worse) / beta - 1 / (2 * beta)) ** 2 / total
        else:
            right = math.log(sigmoid(better - worse))
            wrong = math.log(sigmoid(worse - better))
            values["loss"] -= ((1 - smoothing) * right + smoothing * wrong) / total
        values["accuracy"] += win(better, worse) / total
        values["chosen_reward"] += better / total
        values["rejected_reward"] += worse / total
        values["margin"] += (better - worse) / total
    return values


def columns(rows: Rows) -> list[Tensor]:
    return [torch.tensor(column) for column in zip(*rows)]


# Eighths are exact in float32, so both sides agree about ties.
EIGHTHS = st.integers(-64, 0).map(lambda x: x / 8)
ROWS = st.lists(st.tuples(EIGHTHS, EIGHTHS, EIGHTHS, EIGHTHS), min_size=1, max_size=9)


@given(rows=ROWS, total=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_bradley_terry_agrees_with_a_slow_loop(rows: Rows, total: int) -> None:
    chosen_P, rejected_P, margin_P, _ = columns(rows)
    actual = values(bradley_terry_loss(chosen_P, rejected_P, total, margin_P))
    expected = slow_bradley_terry(rows, total)
    assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(
    rows=ROWS,
    total=st.integers(1, 20),
    beta=st.sampled_from([0.125, 0.5, 2.0]),
    smoothing=st.sampled_from([0.0, 0.1, 0.4]),
    ipo=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_dpo_agrees_with_a_slow_loop(rows: Rows, total: int, beta: float, smoothing: float, ipo: bool) -> None:
    actual = values(dpo_loss(*columns(rows), total_pairs=total, beta=beta, label_smoothing=smoothing, ipo=ipo))
    assert actual == pytest.approx(slow_dpo(rows, total, beta, smoothing, ipo), rel=1e-5, abs=1e-5)


def test_simpo_subtracts_its_target_from_the_scaled_difference() -> None:
    # beta = 2, mean log-probabilities -0.5 and -1: rewards -1 and -2, a gap of 1, minus gamma = 0.25.
    output = simpo_loss(torch.tensor([-0.5]), torch.tensor([-1.0]), 1, beta=2.0, gamma=0.25)
    assert values(output) == {
        "loss": round(LN(1 + math.exp(-0.75)), 6),
        "accuracy": 1.0,
        "chosen_reward": -1.0,
        "rejected_reward": -2.0,
        "margin": 1.0,
    }


def test_orpo_is_the_likelihood_plus_the_log_sigmoid_of_the_odds_ratio() -> None:
    # Probabilities 3/4 and 1/2 have the odds 3 and 1. The sigmoid of ln 3 is 3/4.
    output = orpo_loss(torch.tensor([LN(3 / 4)]), torch.tensor([LN(1 / 2)]), 1, beta=0.5)
    assert values(output)["loss"] == round(-LN(3 / 4) - 0.5 * LN(3 / 4), 6)
    assert values(output)["nll"] == round(-LN(3 / 4), 6)
    # The probabilities exp(-0.8) and exp(-1.2), in float64.
    odds_ratio = orpo_loss(torch.tensor([-0.8]), torch.tensor([-1.2]), 1, beta=1.0).loss - 0.8
    log_odds = [x - LN(1 - math.exp(x)) for x in (-0.8, -1.2)]
    assert odds_ratio.item() == pytest.approx(-LN(sigmoid(log_odds[0] - log_odds[1])), abs=1e-6)


@pytest.mark.parametrize("logprob", [0.0, -1e-9, -100.0])
def test_orpo_is_finite_for_a_certain_and_for_an_impossible_response(logprob: float) -> None:
    chosen_P = torch.tensor([logprob], requires_grad=True)
    orpo_loss(chosen_P, torch.tensor([-1.0]), 1, beta=1.0).loss.backward()
    assert chosen_P.grad is not None
    assert chosen_P.grad.isfinite().all()


def test_kto_equals_a_calculation_by_hand() -> None:
    # Log-ratios 1 and -2 of desirable responses, 0.5 of an undesirable one; the KL estimate is 0.25, beta 2.
    ratio_B = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
    is_desirable_B = torch.tensor([True, True, False])
    output = kto_loss(
        ratio_B, is_desirable_B, torch.tensor(0.25), 3, 2, beta=2.0, desirable_weight=1.5, undesirable_weight=0.5
    )
    expected = 1.5 * (1 - sigmoid(2 * 0.75)) + 1.5 * (1 - sigmoid(2 * -2.25)) + 0.5 * (1 - sigmoid(2 * -0.25))
    hand = {
        "loss": expected / 3,
        "accuracy": 1 / 3,
        "chosen_reward": -1.0,
        "rejected_reward": 1.0,
        "margin": -2.0,
        "kl": 0.25,
    }
    assert values(output) == pytest.approx(hand, abs=1e-6)
    output.loss.backward()
    assert ratio_B.grad is not None
    slopes = [-1.5 * 2 * sigmoid(1.5) * sigmoid(-1.5), -1.5 * 2 * sigmoid(4.5) * sigmoid(-4.5)]
    slopes.append(0.5 * 2 * sigmoid(0.5) * sigmoid(-0.5))
    assert ratio_B.grad.tolist() == pytest.approx([x / 3 for x in slopes], abs=1e-6)


def test_the_kl_estimate_of_kto_is_a_mean_that_is_never_negative_and_has_no_gradient() -> None:
    ratio_B = torch.tensor([1.0, -0.5, 1.0], requires_grad=True)
    assert (kto_kl(ratio_B).item(), kto_kl(ratio_B).requires_grad) == (0.5, False)
    assert kto_kl(-ratio_B).item() == 0


def test_micro_batches_of_kto_sum_to_the_step() -> None:
    ratio_B = torch.tensor([1.0, -2.0, 0.5, 3.0])
    is_desirable_B = torch.tensor([True, False, False, True])
    parts = [
        values(kto_loss(ratio_B[part], is_desirable_B[part], torch.tensor(0.25), 4, 2, beta=0.5))
        for part in (slice(0, 4), slice(0, 1), slice(1, 4))
    ]
    assert {name: parts[1][name] + parts[2][name] for name in parts[0]} == pytest.approx(parts[0], abs=2e-6)


LOSSES: dict[str, Callable[[list[Tensor], float], LossOutput]] = {
    "bradley_terry": lambda x, total: bradley_terry_loss(x[0], x[1], total),
    "with margin": lambda x, total: bradley_terry_loss(x[0], x[1], total, x[2].detach()),
    "dpo": lambda x, total: dpo_loss(*x, total_pairs=total, beta=0.5),
    "conservative": lambda x, total: dpo_loss(*x, total_pairs=total, beta=0.5, label_smoothing=0.2),
    "ipo": lambda x, total: dpo_loss(*x, total_pairs=total, beta=0.5, ipo=True),
    "simpo": lambda x, total: simpo_loss(x[0], x[1], total, beta=2.0, gamma=0.5),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


@every_loss
@given(rows=ROWS, cut=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_micro_batches_sum_to_the_complete_step(name: str, rows: Rows, cut: int) -> None:
    def looked_at(parts: list[Rows]) -> tuple[dict[str, float], Tensor]:
        sums: dict[str, float] = {}
        gradients = []
        for part in parts:
            inputs = [x_P.requires_grad_() for x_P in columns(part)]
            output = LOSSES[name](inputs, len(rows))
            gradients.append(torch.cat(torch.autograd.grad(output.loss, inputs[:2])).view(2, -1))
            assert not any(metric.requires_grad for metric in output.metrics.values())
            for metric, x in {"loss": output.loss, **output.metrics}.items():
                sums[metric] = sums.get(metric, 0.0) + x.item()
        return sums, torch.cat(gradients, 1)

    whole = looked_at([rows])
    parts = looked_at([part for part in (rows[:cut], rows[cut:]) if part])
    assert parts[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-5)
    torch.testing.assert_close(parts[1], whole[1], atol=1e-6, rtol=1e-5)


@every_loss
def test_a_step_moves_chosen_and_rejected_log_probs_equally_in_opposite_directions(name: str) -> None:
    inputs = [x_P.requires_grad_() for x_P in columns([(-1.0, -2.0, -1.5, -1.0), (-4.0, -1.0, -1.0, -1.0)])]
    better_P, worse_P = torch.autograd.grad(LOSSES[name](inputs, 2).loss, inputs[:2])
    assert (better_P < 0).all() or name == "ipo"
    assert better_P.equal(-worse_P)
    # The incorrectly ranked pair has the larger gradient.
    assert better_P[1] < better_P[0]


def test_ipo_reduces_a_gap_that_is_too_large() -> None:
    chosen_P = torch.tensor([3.0], requires_grad=True)
    (gradient_P,) = torch.autograd.grad(
        dpo_loss(chosen_P, *[torch.zeros(1)] * 3, total_pairs=1, beta=0.5, ipo=True).loss, chosen_P
    )
    # 2 * (3 - 1 / (2 * 0.5))
    assert gradient_P.item() == 4.0


def test_no_gradient_flows_into_the_reference() -> None:
    inputs = [x_P.requires_grad_() for x_P in columns([(-1.0, -2.0, -1.5, -1.0)])]
    dpo_loss(*inputs, total_pairs=1, beta=0.1).loss.backward()
    assert [x_P.grad is not None for x_P in inputs] == [True, True, False, False]


@every_loss
@pytest.mark.parametrize("far", [1e4, -1e4, 1e8, -1e8])
def test_extreme_values_give_finite_losses_and_gradients(name: str, far: float) -> None:
    inputs = [
        x_P.requires_grad_() for x_P in (torch.tensor([far, 0.0]), torch.zeros(2), torch.zeros(2), torch.zeros(2))
    ]
    output = LOSSES[name](inputs, 2)
    assert all(math.isfinite(x) for x in values(output).values())
    assert all(x_P.isfinite().all() for x_P in torch.autograd.grad(output.loss, inputs[:2]))
    if name in ("bradley_terry", "with margin"):
        # The loss is linear for a large negative gap and 0 for a large positive one. The other pair is a tie.
        assert output.loss.item() == pytest.approx((max(-far, 0) + LN(2)) / 2)


def test_losses_are_float32_for_scores_of_any_dtype() -> None:
    chosen_P = torch.tensor([1.0], dtype=torch.bfloat16)
    rejected_P = torch.tensor([0.5], dtype=torch.bfloat16)
    assert bradley_terry_loss(chosen_P, rejected_P, 1).loss.dtype == torch.float32
    assert dpo_loss(*[chosen_P, rejected_P] * 2, total_pairs=1, beta=0.1).loss.dtype == torch.float32


ONE = torch.zeros(1)
TWO = torch.zeros(2)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: bradley_terry_loss(TWO, ONE, 1), ["chosen_P", "[2]", "rejected_P", "[1]"]),
        (lambda: bradley_terry_loss(TWO, TWO, 1, ONE), ["chosen_P", "[2]", "margin_P", "[1]"]),
        (lambda: bradley_terry_loss(TWO.view(1, 2), TWO.view(1, 2), 1), ["[1, 2]", "[P]"]),
        (lambda: bradley_terry_loss(TWO, TWO, 0), ["total_pairs=0"]),
        (lambda: bradley_terry_loss(TWO, TWO, math.nan), ["total_pairs=nan"]),
        (lambda: dpo_loss(TWO, TWO, ONE, TWO, 1, beta=0.1), ["reference_chosen_P", "[1]"]),
        (lambda: dpo_loss(TWO, TWO, TWO, ONE, 1, beta=0.1), ["reference_rejected_P", "[1]"]),
        (lambda: dpo_loss(TWO, TWO, TWO, TWO, -1, beta=0.1), ["total_pairs=-1"]),
        (lambda: simpo_loss(TWO, ONE, 1, beta=2, gamma=0.5), ["chosen_P", "[2]", "rejected_P", "[1]"]),
        (lambda: orpo_loss(TWO, ONE, 1, beta=0.1), ["chosen_P", "[2]", "rejected_P", "[1]"]),
        (lambda: kto_loss(TWO, ONE > 0, torch.zeros(()), 1, 1, beta=0.1), ["log_ratio_B", "is_desirable_B", "[1]"]),
    ],
)
def test_bad_arguments_raise_an_error(call: Callable[[], LossOutput], facts: list[str]) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        call()
