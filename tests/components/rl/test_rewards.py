"""Reward shaping, per-token rewards, and the group filter of dynamic sampling. B sequences."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rl.group_filter import groups_within
from components.rl.rewards import overlong_penalty
from components.rl.token_rewards import stop_properly_penalty, token_rewards
from tests.messages import says

Sequences = list[tuple[float, list[tuple[bool, float]]]]  # reward, then (acts, kl) of each token
sequences = st.lists(
    st.tuples(st.floats(-3, 3), st.lists(st.tuples(st.booleans(), st.floats(-2, 2)), max_size=6)), max_size=6
)


def slow_token_rewards(batch: Sequences, kl_coef: float) -> list[float]:
    out = []
    for reward, tokens in batch:
        part = [-kl_coef * kl if acts else 0.0 for acts, kl in tokens]
        acting = [t for t, (acts, _) in enumerate(tokens) if acts]
        if acting:
            part[acting[-1]] += reward
        out += part
    return out


def test_the_reward_goes_to_the_last_action_token_and_the_penalty_to_all() -> None:
    # Two sequences. First: prompt, action, action. Second: prompt, action, environment, action, environment.
    mask_N = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0], dtype=torch.bool)
    kl_N = torch.tensor([9.0, 1.0, -2.0, 9.0, 4.0, 9.0, 8.0, 9.0])
    actual = token_rewards(torch.tensor([1.0, 2.0]), kl_N, 0.25, mask_N, torch.tensor([3, 5]))
    assert actual.tolist() == [0.0, -0.25, 1.5, 0.0, -1.0, 0.0, 0.0, 0.0]


def test_a_sequence_without_an_action_token_has_no_reward() -> None:
    mask_N = torch.tensor([0, 0, 1], dtype=torch.bool)
    actual = token_rewards(torch.tensor([5.0, 7.0, 1.0]), None, 0.1, mask_N, torch.tensor([2, 0, 1]))
    assert actual.tolist() == [0.0, 0.0, 1.0]


def test_a_divergence_outside_the_mask_is_ignored() -> None:
    mask_N = torch.tensor([False, True])
    kl_N = torch.tensor([float("nan"), 1.0])
    assert token_rewards(torch.tensor([1.0]), kl_N, 0.5, mask_N, torch.tensor([2])).tolist() == [0.0, 0.5]


def test_a_coefficient_of_zero_ignores_an_infinite_divergence() -> None:
    kl_N = torch.tensor([float("inf")])
    assert token_rewards(torch.ones(1), kl_N, 0.0, torch.ones(1).bool(), torch.tensor([1])).tolist() == [1.0]


def test_an_empty_batch_has_no_rewards() -> None:
    none = torch.zeros(0)
    assert token_rewards(none, none, 0.1, none.bool(), none.long()).tolist() == []


@given(sequences, st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_rewards_agree_with_a_scalar_loop(batch: Sequences, kl_coef: float) -> None:
    tokens = [token for _, part in batch for token in part]
    actual = token_rewards(
        torch.tensor([reward for reward, _ in batch]),
        torch.tensor([kl for _, kl in tokens]),
        kl_coef,
        torch.tensor([acts for acts, _ in tokens], dtype=torch.bool),
        torch.tensor([len(part) for _, part in batch], dtype=torch.int64),
    )
    assert actual.tolist() == pytest.approx(slow_token_rewards(batch, kl_coef), abs=1e-5)


def test_differing_sizes_are_named_in_the_error() -> None:
    mask_N = torch.ones(3).bool()
    with pytest.raises(ValueError, match=says("reward_B", "[1]", "2 sequences", "3 tokens")):
        token_rewards(torch.ones(1), None, 0.0, mask_N, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=says("action_mask_N", "[3]", "2 sequences", "4 tokens")):
        token_rewards(torch.ones(2), None, 0.0, mask_N, torch.tensor([2, 2]))
    with pytest.raises(ValueError, match=says("kl_N", "[1]", "[3]")):
        token_rewards(torch.ones(2), torch.ones(1), 0.0, mask_N, torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("length", "expected"),
    # At most 20 tokens. The last 4 are penalised by at most 2 in total: half a reward per token from the 17th on.
    [(0, 1.0), (15, 1.0), (16, 1.0), (17, 0.5), (18, 0.0), (19, -0.5), (20, -1.0), (21, -1.0), (4000, -1.0)],
)
def test_the_overlong_penalty_rises_linearly_over_the_buffer(length: int, expected: float) -> None:
    reward_B = torch.tensor([1.0, -3.0])
    actual = overlong_penalty(reward_B, torch.tensor([length, 1]), max_length=20, buffer_length=4, factor=2.0)
    assert actual.tolist() == [expected, -3.0]
    assert reward_B.tolist() == [1.0, -3.0]


@given(
    st.lists(st.tuples(st.floats(-3, 3, width=32), st.integers(0, 60)), max_size=40),
    st.integers(1, 40),
    st.integers(0, 20),
    st.floats(0, 4),
)
@settings(max_examples=100, deadline=None)
def test_overlong_penalties_agree_with_a_scalar_loop(
    responses: list[tuple[float, int]], buffer: int, before: int, factor: float
) -> None:
    slow = []
    for reward, length in responses:
        exceed = min(length - before, buffer)
        slow.append(reward - exceed / buffer * factor if exceed > 0 else reward)
    actual = overlong_penalty(
        torch.tensor([reward for reward, _ in responses]),
        torch.tensor([length for _, length in responses], dtype=torch.int64),
        before + buffer,
        buffer,
        factor,
    )
    assert actual.tolist() == pytest.approx(slow, abs=1e-5)


@pytest.mark.parametrize(
    ("coef", "expected"),
    [(1.0, [2.0, 2.0, -4.0]), (0.25, [2.0, 0.5, -1.0]), (0.0, [2.0, 0.0, 0.0]), (-0.5, [2.0, -0.5, -0.5])],
)
def test_truncated_responses_get_a_fraction_of_the_reward_or_a_fixed_negative_one(
    coef: float, expected: list[float]
) -> None:
    actual = stop_properly_penalty(torch.tensor([2.0, 2.0, -4.0]), torch.tensor([False, True, True]), coef)
    assert actual.tolist() == expected


@given(st.lists(st.tuples(st.floats(-3, 3, width=32), st.booleans()), max_size=40), st.floats(-3, 1))
@settings(max_examples=100, deadline=None)
def test_penalties_of_truncation_agree_with_a_scalar_loop(responses: list[tuple[float, bool]], coef: float) -> None:
    slow = [reward for reward, _ in responses]
    for i, (reward, is_cut) in enumerate(responses):
        if is_cut and coef >= 0:
            slow[i] = reward * coef
        elif is_cut:
            slow[i] = coef
    actual = stop_properly_penalty(
        torch.tensor([reward for reward, _ in responses]),
        torch.tensor([cut for _, cut in responses], dtype=torch.bool),
        coef,
    )
    assert actual.tolist() == pytest.approx(slow, abs=1e-6)


def test_penalties_with_differing_sizes_are_named_in_the_error() -> None:
    with pytest.raises(ValueError, match=says("reward_B", "[2]", "response_length_B", "[3]")):
        overlong_penalty(torch.ones(2), torch.ones(3), 20, 4, 1.0)
    with pytest.raises(ValueError, match=says("reward_B", "[2]", "truncated_B", "[1]")):
        stop_properly_penalty(torch.ones(2), torch.ones(1).bool(), 0.5)
    with pytest.raises(ValueError, match=says("truncated_B", "torch.float32", "bool")):
        stop_properly_penalty(torch.ones(2), torch.ones(2), 0.5)


@pytest.mark.parametrize(
    ("scores", "groups", "low", "high", "within"),
    [
        # All wrong, some correct, all correct.
        ([0, 0, 0, 1, 1, 1], [5, 5, -2, -2, 9, 9], 0.0, 1.0, [0, 0, 1, 1, 0, 0]),
        # Interleaved groups of sizes 3, 1, 1 with means 2/3, 1/2, 1/4.
        ([1, 0.5, 0, 0.25, 1], [7, 0, 7, 2**40, 7], 0.25, 0.6, [0, 1, 0, 0, 0]),
        ([], [], 0.0, 1.0, []),
        ([-5, 5, 100], [0, 0, 1], -math.inf, math.inf, [1, 1, 1]),
    ],
)
def test_group_filtering_equals_a_calculation_by_hand(
    scores: list[float], groups: list[int], low: float, high: float, within: list[int]
) -> None:
    score_B = torch.tensor(scores, dtype=torch.float32)
    group_B = torch.tensor(groups, dtype=torch.int64)
    assert groups_within(score_B, group_B, low, high).tolist() == within


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", [0.1, 0.7, 1 / 3, -0.3])
def test_the_mean_of_equal_scores_is_exactly_that_score(score: float, dtype: torch.dtype) -> None:
    # The sum of seven numbers 0.1, divided by 7, may differ from 0.1 by rounding, and float32 has no exact 0.1.
    for size in (1, 3, 7, 49):
        score_B = torch.full((size,), score, dtype=dtype)
        group_B = torch.zeros(size, dtype=torch.int64)
        assert not groups_within(score_B, group_B, score, 9.0).any()
        assert not groups_within(score_B, group_B, -9.0, score).any()


def test_a_mean_that_equals_the_bound_up_to_rounding_does_not_pass() -> None:
    # The float32 numbers 0.1, 0.2 and 0.3 have a mean that is larger than the float32 number 0.2 by 2.5e-9.
    score_B = torch.tensor([0.1, 0.2, 0.3])
    group_B = torch.zeros(3, dtype=torch.int64)
    assert not groups_within(score_B, group_B, 0.2, 1.0).any()


scored = st.lists(
    st.tuples(st.sampled_from([-3, 0, 1, 2**40]), st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0])), max_size=40
)


@given(scored, st.sampled_from([0.0, 0.1, 0.3, 0.5]), st.sampled_from([0.7, 0.75, 1.0]))
@settings(max_examples=100, deadline=None)
def test_group_filtering_agrees_with_a_scalar_loop(responses: list[tuple[int, float]], low: float, high: float) -> None:
    def narrow(x: float) -> float:
        return torch.tensor(x, dtype=torch.float32).item()

    slow = []
    for group, _ in responses:
        mean = narrow(statistics.fmean(narrow(score) for other, score in responses if other == group))
        slow.append(mean not in (narrow(low), narrow(high)) and low < mean < high)
    score_B = torch.tensor([score for _, score in responses], dtype=torch.float32)
    group_B = torch.tensor([group for group, _ in responses], dtype=torch.int64)
    assert groups_within(score_B, group_B, low, high).tolist() == slow


def test_bad_scores_and_bounds_are_named_in_the_error() -> None:
    score_B = torch.tensor([0.0, 1.0, 0.0])
    group_B = torch.tensor([4, 4, 31])
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=says("score_B[2]", bad, "group 31")):
            groups_within(torch.tensor([0.0, 1.0, bad]), group_B, 0.0, 1.0)
    with pytest.raises(ValueError, match=says("low=1.0", "high=1.0", "low < high")):
        groups_within(score_B, group_B, 1.0, 1.0)
    with pytest.raises(ValueError, match="low=nan"):
        groups_within(score_B, group_B, math.nan, 0.5)
    with pytest.raises(ValueError, match=says("[3]", "group_B", "[2]")):
        groups_within(score_B, group_B[:2], 0.0, 1.0)
    with pytest.raises(ValueError, match=says("group_B", "torch.bool", "integer")):
        groups_within(score_B, group_B == 4, 0.0, 1.0)


@pytest.mark.parametrize("coef", [-1.0, 0.0, 0.5])
def test_a_penalty_does_not_hide_a_nan_reward(coef: float) -> None:
    actual = stop_properly_penalty(torch.tensor([math.nan, 1.0]), torch.tensor([True, False]), coef)
    assert actual.isnan().tolist() == [True, False]
