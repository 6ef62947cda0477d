"""Masked operations and recurrences along sequences. B sequences, N tokens end to end."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rl.masked import (
    LOG_RATIO_LIMIT,
    check_columns,
    check_lengths,
    check_sequences,
    chosen,
    log_ratio,
    sequence_means,
    sequence_sums,
    spread,
    token_mean,
)
from components.rl.recurrence import carried_back
from tests.messages import says

NAN = math.nan
INF = math.inf
lengths_of = st.lists(st.integers(0, 40), max_size=8)


def slow_carried_back(x: list[float], carry: list[float]) -> list[float]:
    later = 0.0
    y = []
    for x_t, carry_t in zip(reversed(x), reversed(carry), strict=True):
        later = x_t + carry_t * later if carry_t else x_t
        y.append(later)
    return y[::-1]


def close_to(expected: list[float]) -> object:
    return pytest.approx(expected, rel=1e-4, abs=1e-4, nan_ok=True)


def test_carried_back_equals_a_calculation_by_hand() -> None:
    # From the end: 8 (its carry has no successor), 4 + 8 / 2 = 8, then a carry of 0: 2, 1 + 2 * 2 = 5.
    x_N = torch.tensor([1.0, 2.0, 4.0, 8.0])
    carry_N = torch.tensor([2.0, 0.0, 0.5, 9.0])
    assert carried_back(x_N, carry_N).tolist() == [5.0, 2.0, 8.0, 8.0]


@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 128, 129, 64 * 64, 64 * 64 + 1, 64 * 64 + 77])
def test_carried_back_agrees_with_a_scalar_loop_over_any_number_of_blocks(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x_N = torch.randint(-4, 5, (size,), generator=generator).float()
    often_N, seldom_N = (torch.rand(size, generator=generator) > share for share in (0.1, 0.001))
    for carry_N in (torch.ones(size), seldom_N.float(), often_N * 0.875, torch.zeros(size), seldom_N * 0.999):
        given_x_N = x_N.clone()
        given_carry_N = carry_N.clone()
        assert carried_back(x_N, carry_N).tolist() == close_to(slow_carried_back(x_N.tolist(), carry_N.tolist()))
        # The inputs are not changed.
        assert torch.equal(x_N, given_x_N)
        assert torch.equal(carry_N, given_carry_N)


@given(st.lists(st.integers(1, 90), max_size=8), st.integers(0, 10**6), st.sampled_from([1.0, 0.5, 0.95, 0.0]))
@settings(max_examples=60, deadline=None)
def test_carried_back_does_not_cross_sequence_boundaries(lengths: list[int], seed: int, discount: float) -> None:
    x_N = torch.randint(-8, 9, (sum(lengths),), generator=torch.Generator().manual_seed(seed)) / 8
    carry_N = torch.full_like(x_N, discount)
    carry_N[torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1] = 0.0
    whole = carried_back(x_N, carry_N).tolist()
    assert whole == close_to(slow_carried_back(x_N.tolist(), carry_N.tolist()))
    alone = [y for part_N in x_N.split(lengths) for y in slow_carried_back(part_N.tolist(), [discount] * len(part_N))]
    assert whole == close_to(alone)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1, 63, 64, 65, 127, 128, 4095, 4096, 4199])
def test_nonfinite_values_do_not_cross_a_carry_of_zero(place: int, bad: float) -> None:
    x_N = torch.ones(4200)
    carry_N = torch.ones(4200)
    # Sequences end at every 50th token.
    carry_N[49::50] = 0.0
    x_N[place] = bad
    first = place // 50 * 50
    expected_N = torch.arange(50, 0, -1).float().repeat(84)
    expected_N[first : place + 1] = bad
    assert torch.equal(carried_back(x_N, carry_N).nan_to_num(nan=-7.0), expected_N.nan_to_num(nan=-7.0))


def test_a_nan_reaches_all_earlier_blocks_of_its_sequence() -> None:
    x_N = torch.zeros(5000)
    carry_N = torch.ones(5000)
    carry_N[999] = 0.0
    x_N[4500] = NAN
    y_N = carried_back(x_N, carry_N)
    assert y_N[1000:4501].isnan().all()
    assert not y_N[:1000].any()
    assert not y_N[4501:].any()


def test_sums_and_means_of_sequences_equal_a_calculation_by_hand() -> None:
    x_N = torch.tensor([1.0, 2.0, 4.0, 8.0])
    mask_N = torch.tensor([True, False, True, False])
    lengths_B = torch.tensor([0, 3, 0, 1, 0])
    assert sequence_sums(x_N, lengths_B).tolist() == [0.0, 7.0, 0.0, 8.0, 0.0]
    # (1 + 4) / 2. The other sequence has no masked token.
    assert sequence_means(x_N, mask_N, lengths_B).tolist() == [0.0, 2.5, 0.0, 0.0, 0.0]
    assert spread(torch.arange(5.0), lengths_B, 4).tolist() == [1.0, 1.0, 1.0, 3.0]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_without_tokens_sums_are_zero_and_differentiable(lengths: list[int]) -> None:
    x_N = torch.zeros(0, requires_grad=True)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    for found_B in (sequence_sums(x_N, lengths_B), sequence_means(x_N, torch.zeros(0).bool(), lengths_B)):
        assert found_B.tolist() == [0.0] * len(lengths)
        found_B.sum().backward()
    assert x_N.grad is not None
    assert x_N.grad.shape == (0,)
    assert spread(torch.zeros(len(lengths)), lengths_B, 0).tolist() == []


@given(lengths_of, st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_sums_means_and_standard_deviations_agree_with_scalar_loops(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    x_N = torch.randn(size, generator=generator).requires_grad_()
    mask_N = torch.rand(size, generator=generator) < 0.6
    sums = []
    means = []
    at_tokens = []
    slopes = []
    start = 0
    for i, length in enumerate(lengths):
        total = 0.0
        acting = 0.0
        count = 0
        for t in range(start, start + length):
            total += x_N[t].item()
            acting += x_N[t].item() if mask_N[t] else 0.0
            count += bool(mask_N[t])
            at_tokens.append(float(i))
        sums.append(total)
        means.append(acting / count if count else 0.0)
        slopes += [(i + 1) / count if mask_N[t] else 0.0 for t in range(start, start + length)]
        start += length
    mean_B = sequence_means(x_N, mask_N, lengths_B)
    assert sequence_sums(x_N, lengths_B).tolist() == close_to(sums)
    assert mean_B.tolist() == close_to(means)
    assert spread(torch.arange(float(len(lengths))), lengths_B, size).tolist() == at_tokens
    (gradient_N,) = torch.autograd.grad((mean_B * torch.arange(1.0, len(lengths) + 1)).sum(), x_N)
    assert gradient_N.tolist() == close_to(slopes)


def test_a_nan_affects_only_the_sum_of_its_sequence_and_none_if_masked() -> None:
    x_N = torch.tensor([1.0, NAN, 2.0, 3.0], requires_grad=True)
    lengths_B = torch.tensor([1, 2, 1])
    assert sequence_sums(x_N, lengths_B).tolist() == pytest.approx([1.0, NAN, 3.0], nan_ok=True)
    masked_B = sequence_means(x_N, torch.tensor([True, False, True, True]), lengths_B)
    assert masked_B.tolist() == [1.0, 2.0, 3.0]
    masked_B.sum().backward()
    assert x_N.grad is not None
    assert x_N.grad.tolist() == [1.0, 0.0, 1.0, 1.0]


def test_chosen_is_float32_and_ignores_masked_values() -> None:
    x_N = torch.tensor([1.0, NAN, INF, -2.0], dtype=torch.bfloat16, requires_grad=True)
    found_N = chosen(torch.tensor([True, False, False, True]), x_N)
    assert found_N.tolist() == [1.0, 0.0, 0.0, -2.0]
    assert found_N.dtype == torch.float32
    found_N.sum().backward()
    assert x_N.grad is not None
    assert x_N.grad.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_log_ratios_equal_a_calculation_by_hand() -> None:
    # -1 - (-3) = 2. Outside of the mask 0. Clipped at both limits, where the gradient ends. A NaN is kept.
    logprob_N = torch.tensor([-1.0, NAN, 0.0, -1e4, -INF, NAN], requires_grad=True)
    old_N = torch.tensor([-3.0, -INF, -1e4, 0.0, -1.0, -1.0], requires_grad=True)
    mask_N = torch.tensor([True, False, True, True, True, True])
    found_N = log_ratio(logprob_N, old_N, mask_N)
    limit = LOG_RATIO_LIMIT
    assert found_N.tolist() == pytest.approx([2.0, 0.0, limit, -limit, -limit, NAN], nan_ok=True)
    found_N[:5].sum().backward()
    assert logprob_N.grad is not None
    assert logprob_N.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert old_N.grad is None


def test_log_ratios_of_low_precision_are_computed_in_float32() -> None:
    # In bfloat16, 257 would be rounded to 256.
    found_N = log_ratio(torch.tensor([-256.0]).bfloat16(), torch.tensor([-257.0]), torch.tensor([True]))
    assert found_N.tolist() == [1.0]


def test_a_token_mean_divides_by_the_passed_count() -> None:
    x_N = torch.tensor([1.0, NAN, 5.0])
    assert token_mean(x_N, torch.tensor([True, False, True]), 4).item() == 1.5
    assert token_mean(torch.tensor([True, True]), torch.tensor([True, False]), 4).item() == 0.25
    assert token_mean(x_N, torch.zeros(3).bool(), 4).item() == 0.0
    assert token_mean(x_N, torch.ones(3).bool(), 4).isnan()


def test_inputs_that_would_silently_give_wrong_results_raise_an_error() -> None:
    mask_N = torch.ones(2).bool()
    with pytest.raises(ValueError, match=says("x_N", "[2, 1]", "[2]")):
        token_mean(torch.ones(2, 1), mask_N, 2)
    with pytest.raises(ValueError, match=says("mask", "bool", "torch.int64")):
        check_columns(mask_N.long())
    with pytest.raises(ValueError, match=says("mask", "torch.bool", "[N]", "[2, 1]")):
        check_columns(mask_N[:, None])
    for total in (0, -1, NAN):
        with pytest.raises(ValueError, match=says(f"total_tokens={total}")):
            token_mean(torch.ones(2), mask_N, total)
    with pytest.raises(ValueError, match=says("lengths_B", "3 tokens", 2)):
        check_lengths(mask_N, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=says("lengths[1]", -1)):
        check_lengths(mask_N, torch.tensor([3, -1]))
    with pytest.raises(ValueError, match=says("lengths", "integers", "torch.float32", "[1]")):
        check_lengths(mask_N, torch.tensor([2.0]))
    with pytest.raises(ValueError, match=says("reward_B", "[2]", "kl_B", "[2, 1]")):
        check_sequences(torch.ones(2), kl_B=torch.ones(2, 1))
    with pytest.raises(ValueError, match=says("reward_B", "[2, 1]", "[B]")):
        check_sequences(torch.ones(2, 1), kl_B=torch.ones(2, 1))


def test_the_sum_of_a_long_sequence_is_precise() -> None:
    # Summed sequentially in float32, these numbers 0.1 give 100958.
    assert sequence_sums(torch.full((1_000_000,), 0.1), torch.tensor([1_000_000])).item() == pytest.approx(
        1e5, rel=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_lengths_may_be_integers_of_any_kind(dtype: torch.dtype) -> None:
    lengths_B = torch.tensor([2, 0, 1], dtype=dtype)
    check_lengths(torch.ones(3).bool(), lengths_B)
    assert sequence_sums(torch.tensor([1.0, 2.0, 4.0]), lengths_B).tolist() == [3.0, 0.0, 4.0]
    assert spread(torch.tensor([5.0, 6.0, 7.0]), lengths_B, 3).tolist() == [5.0, 5.0, 7.0]
    with pytest.raises(ValueError, match=says("lengths", "torch.bool")):
        check_lengths(torch.ones(1).bool(), torch.tensor([True]))
