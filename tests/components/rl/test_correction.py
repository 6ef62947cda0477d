"""Weights, rejection and metrics of the mismatch between trainer and engine.

Legend: B sequences, N tokens end to end.

Log-ratios are multiples of 1/8, so that differences and sums are exact in float32. Of their exponentials only e^0 = 1
is a bound in these tests. Loops and tensors therefore never differ by rounding at a bound.
"""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rl.correction import Estimator, Level, Outside, importance_weights, rejection_weights
from components.rl.mismatch import mismatch_metrics
from tests.messages import says

Tokens = list[tuple[bool, float, float]]  # acts, d = log p - log q, log q
LOG2 = math.log(2.0)
NAN = math.nan

ratios = st.one_of(st.integers(-8, 8), st.sampled_from([0, 0, -200, 200, -1000, 1000])).map(lambda n: n / 8)
mostly = st.sampled_from([True, True, True, False])
tokens = st.tuples(mostly, ratios, st.integers(-80, 0).map(lambda n: n / 8))
batches = st.lists(st.lists(tokens, min_size=1, max_size=40), max_size=5)
levels = st.sampled_from(get_args(Level))
pairs = st.sampled_from([(0.0, 2.0), (0.5, 5.0), (0.0, math.inf), (1.0, 1.0), (1.0, 3.0), (0.9, 1.0), (0.999, 1.001)])

Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def columns(batch: list[Tokens]) -> Columns:
    """Return log p, log q, mask and lengths. Log-probabilities are NaN outside the mask."""
    flat = [token for part in batch for token in part]
    return (
        torch.tensor([q + d if acts else NAN for acts, d, q in flat], dtype=torch.float32),
        torch.tensor([q if acts else NAN for acts, _, q in flat], dtype=torch.float32),
        torch.tensor([acts for acts, _, _ in flat], dtype=torch.bool),
        torch.tensor([len(part) for part in batch], dtype=torch.int64),
    )


def of(*sequences: list[float]) -> Columns:
    """Return sequences that consist of action tokens, with log q = 0."""
    return columns([[(True, d, 0.0) for d in part] for part in sequences])


def cut(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def slow_levels(of_token: list[float], level: str) -> list[float]:
    """Values of the action tokens of one sequence."""
    total = sum(of_token)
    shared = {"sequence": total, "geometric": total / max(1, len(of_token))}
    return [x if level == "token" else shared[level] for x in of_token]


def slow_weights(batch: list[Tokens], level: str, low: float, high: float, outside: str) -> list[float]:
    out = []
    for part in batch:
        levelled = iter(slow_levels([cut(d) for acts, d, _ in part if acts], level))
        for acts, _, _ in part:
            w = math.exp(cut(next(levelled))) if acts else 0.0
            if acts and outside == "clamp":
                w = min(max(w, low), high)
            out.append(w if not acts or low <= w <= high else 0.0)
    return out


def slow_rejection(batch: list[Tokens], level: str, estimator: str, low: float, high: float) -> list[float]:
    out = []
    for part in batch:
        ds = [cut(d) for acts, d, _ in part if acts]
        if estimator == "k1":
            inferred = [math.exp(cut(x)) for x in slow_levels(ds, level)]
        else:
            inferred = slow_levels([d * d / 2 if estimator == "k2" else math.exp(d) - 1 - d for d in ds], level)
        left = iter(inferred)
        out += [float(low <= next(left) <= high) if acts else 0.0 for acts, _, _ in part]
    return out


# Two sequences, each after a prompt token. First: d = log 2 and log 1/8, so the product of the ratios is 1/4 and their
# geometric mean 1/2. Second: d = log 4, the same at all levels.
HAND = columns(
    [[(False, 0.0, 0.0), (True, LOG2, -1.0), (True, -3 * LOG2, -1.0)], [(False, 9.0, 0.0), (True, 2 * LOG2, -5.0)]]
)


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [0, 2, 1 / 8, 0, 4]), ("sequence", [0, 1 / 4, 1 / 4, 0, 4]), ("geometric", [0, 1 / 2, 1 / 2, 0, 4])],
)
def test_weights_without_bounds_are_the_ratios(level: Level, expected: list[float]) -> None:
    for outside in get_args(Outside):
        actual = importance_weights(*HAND, level=level, low=0.0, high=math.inf, outside=outside)
        assert actual.tolist() == pytest.approx(expected)
        assert actual.dtype == torch.float32


def test_truncation_takes_the_bound_and_icepop_takes_zero() -> None:
    tis = importance_weights(*HAND, level="token", low=0.0, high=3.0, outside="clamp")
    assert tis.tolist() == pytest.approx([0.0, 2.0, 0.125, 0.0, 3.0])
    both = importance_weights(*HAND, level="token", low=0.5, high=3.0, outside="clamp")
    assert both.tolist() == pytest.approx([0.0, 2.0, 0.5, 0.0, 3.0])
    icepop = importance_weights(*HAND, level="token", low=0.5, high=3.0, outside="zero")
    assert icepop.tolist() == pytest.approx([0.0, 2.0, 0.0, 0.0, 0.0])


def test_a_weight_equal_to_a_bound_is_accepted() -> None:
    on_policy = of([0.0, 0.0], [0.0])
    assert importance_weights(*on_policy, level="token", low=1.0, high=1.0, outside="zero").tolist() == [1.0] * 3
    assert rejection_weights(*on_policy, level="sequence", estimator="k1", low=1.0, high=1.0).tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [
        ("token", 0.5, 4.5, [0, 1, 0, 0, 1]),
        ("token", None, 3.0, [0, 1, 1, 0, 0]),
        ("sequence", 0.3, 4.5, [0, 0, 0, 0, 1]),
        ("geometric", 0.3, 4.5, [0, 1, 1, 0, 1]),
        ("geometric", 0.3, 3.0, [0, 1, 1, 0, 0]),
    ],
)
def test_rejection_by_ratio_equals_a_calculation_by_hand(
    level: Level, low: float | None, high: float, expected: list[float]
) -> None:
    assert rejection_weights(*HAND, level=level, estimator="k1", low=low, high=high).tolist() == expected


@pytest.mark.parametrize(
    ("estimator", "level", "just_below", "just_above"),
    [
        # d = 1 and -2. k2: 1/2 and 2, sum 2.5, mean 1.25.
        ("k2", "sequence", 2.49, 2.5),
        ("k2", "geometric", 1.24, 1.25),
        # k3: e - 2 = 0.71828 and e^-2 + 1 = 1.13534, sum 1.85362, mean 0.92681.
        ("k3", "sequence", 1.853, 1.854),
        ("k3", "geometric", 0.926, 0.927),
    ],
)
def test_rejection_by_estimate_equals_a_calculation_by_hand(
    estimator: Estimator, level: Level, just_below: float, just_above: float
) -> None:
    batch = of([1.0, -2.0])
    for high, expected in ((just_below, [0.0, 0.0]), (just_above, [1.0, 1.0])):
        assert rejection_weights(*batch, level=level, estimator=estimator, low=None, high=high).tolist() == expected


def test_rejection_by_estimate_applies_to_single_tokens() -> None:
    # For d = 1 and -2, k2 is larger for the token whose q was too small (2 against 1/2), and so is k3 (1.135 against
    # 0.718).
    batch = of([1.0, -2.0])
    assert rejection_weights(*batch, level="token", estimator="k2", low=None, high=0.5).tolist() == [1.0, 0.0]
    assert rejection_weights(*batch, level="token", estimator="k3", low=None, high=1.0).tolist() == [1.0, 0.0]
    # With the sign used by k3, d = 3 (e^3 - 4 = 16.1) is worse than d = -3 (e^-3 + 2 = 2.05).
    assert rejection_weights(*of([3.0, -3.0]), level="token", estimator="k3", low=None, high=3.0).tolist() == [0.0, 1.0]


def test_a_sequence_may_be_rejected_for_its_worst_token() -> None:
    # The maximum d^2 / 2 is 2 in the first sequence and 1/2 in the second. A sequence without tokens has none.
    batch = of([1.0, -2.0], [], [1.0, 0.5])
    kept_N = rejection_weights(*batch, level="max", estimator="k2", low=None, high=1.0)
    assert kept_N.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert rejection_weights(*of(), level="max", estimator="k3", low=None, high=1.0).tolist() == []


def test_opposite_deviations_cancel_in_the_sequence_ratio_but_not_in_an_estimate() -> None:
    batch = of([5.0, -5.0], [0.125, -0.125])
    assert rejection_weights(*batch, level="sequence", estimator="k1", low=0.9, high=1.1).tolist() == [1.0] * 4
    assert rejection_weights(*batch, level="sequence", estimator="k2", low=None, high=1.0).tolist() == [0, 0, 1, 1]


def test_masked_importance_sampling_clamps_the_weights_that_it_keeps() -> None:
    # OpenRLHF's numbers: log q = -3, 3, 0, 0 and log p = 0. The geometric mean is 1, so all tokens are kept. Clamped to
    # [0.5, 5] their weights are 5, 0.5, 1, 1 with mean 1.875. Without clamping e^3 alone is 20.
    batch = of([3.0, -3.0, 0.0, 0.0])
    kept_N = rejection_weights(*batch, level="geometric", estimator="k1", low=0.5, high=5.0)
    weight_N = importance_weights(*batch, level="token", low=0.5, high=5.0, outside="clamp")
    assert (kept_N * weight_N).tolist() == [5.0, 0.5, 1.0, 1.0]


def test_ratios_stay_finite_whatever_the_log_probabilities_are() -> None:
    batch = of([1e30, -1e30], [30.0, 30.0], [-math.inf])
    expected_of: dict[Level, list[float]] = {"token": [20, -20, 20, 20, -20], "sequence": [0, 0, 20, 20, -20]}
    for level, expected in expected_of.items():
        actual = importance_weights(*batch, level=level, low=0.0, high=math.inf, outside="zero")
        assert actual.tolist() == pytest.approx([math.exp(x) for x in expected])
    actual = rejection_weights(*batch, level="token", estimator="k3", low=None, high=1e30)
    assert actual.tolist() == [1.0] * 5


@given(batches, levels, pairs, st.sampled_from(get_args(Outside)))
@settings(max_examples=60, deadline=None)
def test_weights_agree_with_a_scalar_loop(
    batch: list[Tokens], level: Level, bounds: tuple[float, float], outside: Outside
) -> None:
    low, high = bounds
    actual = importance_weights(*columns(batch), level=level, low=low, high=high, outside=outside)
    assert actual.tolist() == pytest.approx(slow_weights(batch, level, low, high, outside), rel=1e-5)


@given(batches, levels, pairs)
@settings(max_examples=60, deadline=None)
def test_rejection_by_ratio_agrees_with_a_scalar_loop(
    batch: list[Tokens], level: Level, bounds: tuple[float, float]
) -> None:
    actual = rejection_weights(*columns(batch), level=level, estimator="k1", low=bounds[0], high=bounds[1])
    assert actual.tolist() == slow_rejection(batch, level, "k1", *bounds)


@given(batches, levels, st.sampled_from(["k2", "k3"]), st.sampled_from([0.001, 0.3, 0.5, 3.0, 1e3, math.inf]))
@settings(max_examples=60, deadline=None)
def test_rejection_by_estimate_agrees_with_a_scalar_loop(
    batch: list[Tokens], level: Level, estimator: Estimator, high: float
) -> None:
    actual = rejection_weights(*columns(batch), level=level, estimator=estimator, low=None, high=high)
    assert actual.tolist() == slow_rejection(batch, level, estimator, 0.0, high)


@given(batches, st.sampled_from(["k2", "k3"]), st.sampled_from([0.001, 0.3, 0.5, 3.0, 1e3, math.inf]))
@settings(max_examples=60, deadline=None)
def test_rejection_by_the_worst_token_rejects_its_whole_sequence(
    batch: list[Tokens], estimator: Estimator, high: float
) -> None:
    actual = rejection_weights(*columns(batch), level="max", estimator=estimator, low=None, high=high)
    token_weights = slow_rejection(batch, "token", estimator, 0.0, high)
    expected: list[float] = []
    start = 0
    for tokens in batch:
        weights = token_weights[start : start + len(tokens)]
        start += len(tokens)
        is_kept = all(weight == 1.0 for weight, (acts, *_) in zip(weights, tokens, strict=True) if acts)
        expected += [float(is_kept and acts) for acts, *_ in tokens]
    assert actual.tolist() == expected


@pytest.mark.parametrize("level", get_args(Level))
def test_a_nan_of_an_action_token_stays_in_its_token_or_sequence(level: Level) -> None:
    # The second of three sequences has a NaN in its first action token. Its prompt token stays 0.
    batch = columns(
        [[(True, 0.0, -1.0)], [(False, 0.0, 0.0), (True, NAN, -1.0), (True, 0.0, -1.0)], [(True, 0.0, -1.0)]]
    )
    expected = [1.0, 0.0, NAN, 1.0 if level == "token" else NAN, 1.0]
    for outside in get_args(Outside):
        actual = importance_weights(*batch, level=level, low=0.5, high=2.0, outside=outside)
        assert actual.tolist() == pytest.approx(expected, nan_ok=True)
    for estimator in get_args(Estimator):
        actual = rejection_weights(*batch, level=level, estimator=estimator, low=None, high=2.0)
        assert actual.tolist() == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("level", get_args(Level))
def test_sequences_without_actions_and_empty_batches_have_no_weights(level: Level) -> None:
    prompts = columns([[(False, 1.0, 0.0)] * 2, [], [(False, 0.0, 0.0)]])
    assert importance_weights(*prompts, level=level, low=0.5, high=2.0, outside="clamp").tolist() == [0.0] * 3
    assert rejection_weights(*prompts, level=level, estimator="k3", low=None, high=2.0).tolist() == [0.0] * 3
    for none in (columns([]), columns([[], []])):
        assert importance_weights(*none, level=level, low=0.5, high=2.0, outside="zero").tolist() == []
        assert rejection_weights(*none, level=level, estimator="k2", low=None, high=2.0).tolist() == []


def test_no_gradient_flows_into_weights_and_inputs_are_unchanged() -> None:
    logprob_N, rollout_N, mask_N, lengths_B = of([LOG2, 0.0])
    logprob_N.requires_grad_()
    before = logprob_N.tolist()
    weight_N = importance_weights(
        logprob_N, rollout_N, mask_N, lengths_B, level="token", low=0, high=2, outside="clamp"
    )
    kept_N = rejection_weights(logprob_N, rollout_N, mask_N, lengths_B, level="token", estimator="k2", low=None, high=2)
    assert not weight_N.requires_grad
    assert not kept_N.requires_grad
    assert logprob_N.tolist() == before


def test_mismatch_metrics_equal_a_calculation_by_hand() -> None:
    # w = 2 and 1/2 in one sequence, 4 in another, and a third one without actions.
    batch = columns(
        [[(True, LOG2, -1.0), (True, -LOG2, -1.0)], [(False, 0.0, 0.0)], [(True, 2 * LOG2, -1.0), (False, 0.0, 0.0)]]
    )
    actual = mismatch_metrics(*batch, low=0.6, high=3.0)
    assert actual == pytest.approx(
        {
            # -(log 2 - log 2 + 2 log 2) / 3 the mean of w - 1, and the same of the logarithms
            "mismatch_kl": -2 * LOG2 / 3,
            "mismatch_k3": (1 - 0.5 + 3 - 2 * LOG2) / 3,  # w - 1 of each, and the same logs
            "chi_square_token": (4 + 0.25 + 16) / 3 - 1,
            "chi_square_sequence": (1 + 16) / 2 - 1,  # products 1 and 4
            "effective_sample_size": 6.5**2 / (3 * 20.25),
            "outside_share": 2 / 3,
        },
        rel=1e-6,
    )
    assert list(mismatch_metrics(*batch)) == [name for name in actual if name != "outside_share"]


@pytest.mark.parametrize(
    ("low", "high", "share"), [(None, 3.0, 1 / 3), (0.6, None, 1 / 3), (None, 1.0, 2 / 3), (0.0, 9.0, 0.0)]
)
def test_the_share_outside_may_have_one_bound(low: float | None, high: float | None, share: float) -> None:
    assert mismatch_metrics(*of([LOG2, -LOG2, 2 * LOG2]), low=low, high=high)["outside_share"] == pytest.approx(share)


def slow_metrics(batch: list[Tokens], low: float, high: float) -> dict[str, float]:
    parts = [[cut(d) for acts, d, _ in part if acts] for part in batch]
    ds = [d for part in parts for d in part]
    w = [math.exp(d) for d in ds]
    squares = [math.exp(2 * cut(math.fsum(part))) for part in parts if part]
    if not ds:
        names = ("mismatch_kl", "mismatch_k3", "chi_square_token", "chi_square_sequence", "outside_share")
        return {**dict.fromkeys(names, 0.0), "effective_sample_size": 1.0}
    return {
        "mismatch_kl": math.fsum(-d for d in ds) / len(ds),
        "mismatch_k3": math.fsum(math.exp(d) - 1 - d for d in ds) / len(ds),
        "chi_square_token": math.fsum(x * x for x in w) / len(w) - 1,
        "chi_square_sequence": math.fsum(squares) / len(squares) - 1,
        "effective_sample_size": math.fsum(w) ** 2 / (len(w) * math.fsum(x * x for x in w)),
        "outside_share": sum(not low <= x <= high for x in w) / len(w),
    }


@given(batches, pairs)
@settings(max_examples=60, deadline=None)
def test_metrics_agree_with_a_scalar_loop(batch: list[Tokens], bounds: tuple[float, float]) -> None:
    actual = mismatch_metrics(*columns(batch), low=bounds[0], high=bounds[1])
    assert actual == pytest.approx(slow_metrics(batch, *bounds), rel=1e-6, abs=1e-9)
    assert 0.0 < actual["effective_sample_size"] <= 1.0
    assert actual["mismatch_k3"] >= 0.0


@given(st.lists(st.floats(-(2**-10), 2**-10, width=32), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_small_mismatch_keeps_its_digits(ds: list[float]) -> None:
    # exp(d) - 1 - d is about d^2 / 2 + d^3 / 6. Computed as exp(d) - 1 in float32 it would have no correct digit.
    slow = math.fsum(d * d / 2 + d**3 / 6 for d in ds) / len(ds)
    assert mismatch_metrics(*of(ds))["mismatch_k3"] == pytest.approx(slow, rel=1e-5, abs=1e-15)


def test_a_small_estimate_differs_from_zero() -> None:
    # d = 2^-12: k3 is d^2 / 2 = 3e-8, whereas exp(d) - 1 - d is 0 in float32.
    batch = of([2**-12])
    for high, expected in ((1e-8, [0.0]), (4e-8, [1.0])):
        assert rejection_weights(*batch, level="token", estimator="k3", low=None, high=high).tolist() == expected


@pytest.mark.parametrize("d", [-4.875, -0.25, 0.0, 3.0])
def test_the_effective_sample_size_of_equal_weights_is_exactly_1(d: float) -> None:
    for size in (1, 3, 6, 39):
        share = mismatch_metrics(*of([d] * size))["effective_sample_size"]
        assert share <= 1.0
        assert share == pytest.approx(1.0)


def test_sequences_without_actions_are_accepted() -> None:
    zeros = dict.fromkeys(("mismatch_kl", "mismatch_k3", "chi_square_token", "chi_square_sequence"), 0.0)
    for batch in (columns([]), columns([[(False, 1.0, -1.0)], []])):
        assert mismatch_metrics(*batch) == {**zeros, "effective_sample_size": 1.0}
        assert mismatch_metrics(*batch, high=2.0) == {**zeros, "effective_sample_size": 1.0, "outside_share": 0.0}


def test_a_nan_of_an_action_token_makes_every_metric_nan() -> None:
    actual = mismatch_metrics(*of([0.0, NAN], [0.0]), low=0.5, high=2.0)
    assert len(actual) == 6
    assert all(math.isnan(x) for x in actual.values())


def test_unknown_names_and_bad_shapes_are_named_in_the_error() -> None:
    logprob_N, rollout_N, mask_N, lengths_B = batch = of([0.0, 0.0])
    with pytest.raises(ValueError, match=says("level='turn'", *get_args(Level))):
        importance_weights(*batch, level="turn", low=0.0, high=2.0, outside="clamp")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=says("outside='drop'", *get_args(Outside))):
        importance_weights(*batch, level="token", low=0.0, high=2.0, outside="drop")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=says("estimator='k4'", "k1", "k2", "k3")):
        rejection_weights(*batch, level="token", estimator="k4", low=None, high=2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=says("rollout_logprob_N", "[2, 1]", "[2]")):
        mismatch_metrics(logprob_N, rollout_N[:, None], mask_N, lengths_B)
    with pytest.raises(ValueError, match=says("lengths_B", "3 tokens", 2)):
        mismatch_metrics(logprob_N, rollout_N, mask_N, torch.tensor([3]))
