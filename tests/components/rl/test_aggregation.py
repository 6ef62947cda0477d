"""Aggregation of per-token losses to a scalar. B sequences, N tokens end to end."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.batch import Batch
from components.rl.aggregation import Aggregation, TokenLoss, Totals, aggregate, reduce_loss
from tests.components.rl.loss_cases import AGGREGATIONS, steps
from tests.messages import says

NAN = math.nan
INF = math.inf


def slow_weights(step: Batch, totals: Totals, aggregation: str, max_length: int) -> list[float]:
    """Return the weight of each token, which is the gradient of the aggregated loss."""
    weights: list[float] = []
    for i in range(len(step)):
        mask = step.row(i, "mask").tolist()
        of_token = {
            "token-mean": 1 / totals.tokens,
            "token-sum": 1.0,
            "seq-mean-token-mean": 1 / max(sum(mask), 1) / totals.sequences,
            "seq-mean-token-sum": 1 / totals.sequences,
            "seq-mean-token-sum-norm": 1 / totals.sequences / max_length,
        }[aggregation]
        weights += [of_token if acts else 0.0 for acts in mask]
    return weights


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # First sequence: 1 and 5 are action tokens, 2 is not. Second: no action token. Third: 9. Three tokens in two
        # sequences.
        ("token-mean", 15 / 3),
        ("token-sum", 15),
        ("seq-mean-token-mean", (3 + 9) / 2),
        ("seq-mean-token-sum", (6 + 9) / 2),
        ("seq-mean-token-sum-norm", (6 + 9) / 2 / 4),
    ],
)
def test_aggregates_of_three_sequences_equal_a_calculation_by_hand(aggregation: Aggregation, expected: float) -> None:
    x_N = torch.tensor([1.0, 2.0, 5.0, 7.0, 9.0])
    mask_N = torch.tensor([True, False, True, False, True])
    lengths_B = torch.tensor([3, 1, 1])
    totals = Totals(tokens=3, sequences=2)
    assert aggregate(x_N, mask_N, lengths_B, totals, aggregation, max_length=4).item() == expected
    # Aggregated as one of three parts of a larger step.
    larger = Totals(tokens=9, sequences=6)
    part = expected if aggregation == "token-sum" else expected / 3
    assert aggregate(x_N, mask_N, lengths_B, larger, aggregation, max_length=4).item() == pytest.approx(part)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(step=steps(), max_length=st.integers(1, 50), of_more=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_aggregates_agree_with_a_scalar_loop(
    aggregation: Aggregation, step: Batch, max_length: int, of_more: int
) -> None:
    totals = Totals(tokens=int(step["mask"].sum()) + of_more or 1, sequences=len(step) + of_more)
    slow = slow_weights(step, totals, aggregation, max_length)
    x_N = step["advantage"].clone().requires_grad_()
    actual = aggregate(x_N, step["mask"], step.lengths, totals, aggregation, max_length)
    assert actual.item() == pytest.approx(sum(w * x for w, x in zip(slow, x_N.tolist())), rel=1e-4, abs=1e-5)
    actual.backward()
    assert x_N.grad is not None
    assert x_N.grad.tolist() == pytest.approx(slow, rel=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_nan_affects_only_action_tokens(aggregation: Aggregation) -> None:
    x_N = torch.tensor([NAN, 2.0, INF, -INF], requires_grad=True)
    lengths_B = torch.tensor([2, 2])
    totals = Totals(tokens=1, sequences=1)
    actual = aggregate(x_N, torch.tensor([False, True, False, False]), lengths_B, totals, aggregation, 1)
    actual.backward()
    assert actual.item() == 2.0
    assert x_N.grad is not None
    assert x_N.grad.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert aggregate(x_N, torch.tensor([True, True, False, False]), lengths_B, totals, aggregation, 1).isnan()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("lengths", [[], [0, 0], [3, 2]])
def test_a_micro_batch_without_action_tokens_adds_0(lengths: list[int], aggregation: Aggregation) -> None:
    x_N = torch.full((sum(lengths),), NAN, requires_grad=True)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    mask_N = torch.zeros(sum(lengths)).bool()
    actual = aggregate(x_N, mask_N, lengths_B, Totals(tokens=5, sequences=2), aggregation, 4)
    actual.backward()
    assert actual.item() == 0.0
    assert x_N.grad is not None
    assert x_N.grad.tolist() == [0.0] * sum(lengths)


def two_tokens(weight_N: Tensor | None, aggregation: Aggregation = "token-mean") -> tuple[float, dict[str, Tensor]]:
    loss_N = torch.tensor([1.0, 3.0, NAN], requires_grad=True)
    metrics = {"share": torch.tensor([1.0, 0.0, NAN]), "mean": torch.tensor([2.0, 6.0, INF])}
    mask_N = torch.tensor([True, True, False])
    lengths_B = torch.tensor([1, 2])
    totals = Totals(tokens=4, sequences=2)
    out = reduce_loss(TokenLoss(loss_N, metrics), mask_N, lengths_B, totals, aggregation, 5, weight_N)
    assert not any(x.requires_grad for x in out.metrics.values())
    return out.loss.item(), out.metrics


def test_weights_change_only_the_loss() -> None:
    # (1 + 3) / 4 = 1; (2 * 1 + 0.5 * 3) / 4 = 0.875. The metrics are (1 + 0) / 4 and (2 + 6) / 4 in both cases.
    weight_N = torch.tensor([2.0, 0.5, NAN], requires_grad=True)
    assert two_tokens(None)[0] == 1.0
    assert two_tokens(weight_N)[0] == 0.875
    assert two_tokens(torch.zeros(3))[0] == 0.0
    for actual in (two_tokens(None), two_tokens(weight_N), two_tokens(torch.zeros(3), "seq-mean-token-sum")):
        assert {name: x.item() for name, x in actual[1].items()} == {"share": 0.25, "mean": 2.0}


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    # (2 * 1) and (0.5 * 3) of one sequence each. The mask selects one token of each.
    [("seq-mean-token-mean", 1.75), ("seq-mean-token-sum", 1.75), ("seq-mean-token-sum-norm", 0.35)],
)
def test_weights_apply_to_each_aggregation(aggregation: Aggregation, expected: float) -> None:
    assert two_tokens(torch.tensor([2.0, 0.5, NAN]), aggregation)[0] == pytest.approx(expected)


def test_no_gradient_flows_into_weights_and_a_nan_of_an_action_token_is_returned() -> None:
    loss_N = torch.ones(2, requires_grad=True)
    weight_N = torch.tensor([3.0, 5.0], requires_grad=True)
    mask_N = torch.tensor([True, False])
    totals = Totals(tokens=1, sequences=1)
    reduce_loss(TokenLoss(loss_N), mask_N, torch.tensor([2]), totals, weight_N=weight_N).loss.backward()
    assert weight_N.grad is None
    assert loss_N.grad is not None
    assert loss_N.grad.tolist() == [3.0, 0.0]
    nan_N = torch.tensor([NAN, 1.0])
    assert reduce_loss(TokenLoss(loss_N), mask_N, torch.tensor([2]), totals, weight_N=nan_N).loss.isnan()


def test_a_step_without_tokens_or_sequences_raises_an_error() -> None:
    x_N = torch.ones(2)
    mask_N = torch.ones(2).bool()
    lengths_B = torch.tensor([2])
    one = Totals(1, 1)
    with pytest.raises(ValueError, match="total_tokens=0"):
        aggregate(x_N, mask_N, lengths_B, Totals(tokens=0, sequences=1))
    for aggregation in AGGREGATIONS[2:]:
        with pytest.raises(ValueError, match=says("totals.sequences=0")):
            aggregate(x_N, mask_N, lengths_B, Totals(tokens=1, sequences=0), aggregation, 1)
        with pytest.raises(ValueError, match=says("lengths_B", "3 tokens", 2)):
            aggregate(x_N, mask_N, torch.tensor([3]), one, aggregation, 1)
    for aggregation in AGGREGATIONS:
        with pytest.raises(ValueError, match=says("x_N", "[2, 1]", "[2]")):
            aggregate(x_N[:, None], mask_N, lengths_B, one, aggregation, 1)
        with pytest.raises(ValueError, match=says("mask", "bool", "torch.int64")):
            aggregate(x_N, mask_N.long(), lengths_B, one, aggregation, 1)
    for max_length in (None, 0):
        with pytest.raises(ValueError, match=says("seq-mean-token-sum-norm", f"max_length={max_length}")):
            aggregate(x_N, mask_N, lengths_B, one, "seq-mean-token-sum-norm", max_length)
    with pytest.raises(ValueError, match=says("aggregation='mean'", *AGGREGATIONS)):
        aggregate(x_N, mask_N, lengths_B, one, "mean")  # pyright: ignore[reportArgumentType]
    for shape in ([2, 1], [1]):
        with pytest.raises(ValueError, match=says("weight_N", shape, "[2]")):
            reduce_loss(TokenLoss(x_N), mask_N, lengths_B, one, weight_N=torch.ones(shape))
    with pytest.raises(ValueError, match=says("x_N", "[3]", "[2]")):
        reduce_loss(TokenLoss(x_N, {"mean": torch.ones(3)}), mask_N, lengths_B, one)


def test_a_share_of_tokens_is_nan_if_one_token_is_nan() -> None:
    tokens = TokenLoss(torch.tensor([math.nan, 1.0]), {"clip_frac": torch.tensor([False, True])})
    actual = reduce_loss(tokens, torch.ones(2).bool(), torch.tensor([2]), Totals(tokens=2, sequences=1))
    assert actual.loss.isnan()
    assert actual.metrics["clip_frac"].isnan()
