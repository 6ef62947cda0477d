"""Generalised advantage estimation, returns, and whitening. B sequences, N tokens end to end."""

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rl.advantages import group_mean_baseline, rloo
from components.rl.returns import (
    discounted_returns,
    gae,
    optimal_token_baseline,
    remax,
    turn_advantages,
    turn_returns,
    whiten,
)
from tests.messages import says

# action mask, reward, value. Exact in float32, so that the mean of equal numbers is that number.
Token = tuple[bool, float, float]
# Exact in float32, so that the mean of equal numbers is that number.
eighths = st.integers(-40, 40).map(lambda n: n / 8)
sequences = st.lists(st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2)), max_size=8), max_size=6)
long_sequences = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(-2, 2, width=32)), min_size=1, max_size=40), max_size=5
)


def slow_gae(batch: list[list[Token]], gamma: float, lambd: float) -> tuple[list[float], list[float]]:
    advantages = []
    returns = []
    for tokens in batch:
        advantage = 0.0
        next_value = 0.0
        part: list[tuple[float, float]] = []
        for acts, reward, value in reversed(tokens):
            if not acts:
                part.append((0.0, 0.0))
                continue
            advantage = reward + gamma * next_value - value + gamma * lambd * advantage
            next_value = value
            part.append((advantage, advantage + value))
        advantages += [a for a, _ in reversed(part)]
        returns += [r for _, r in reversed(part)]
    return advantages, returns


def columns(batch: list[list[Token]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = [token for part in batch for token in part]
    return (
        torch.tensor([reward for _, reward, _ in tokens]),
        torch.tensor([value for _, _, value in tokens]),
        torch.tensor([acts for acts, _, _ in tokens], dtype=torch.bool),
        torch.tensor([len(part) for part in batch], dtype=torch.int64),
    )


def test_gae_of_two_sequences_equals_a_calculation_by_hand() -> None:
    # gamma = lambda = 1/2, so gamma * lambda = 1/4. First sequence, after its prompt token: t=2: delta = 2 - 4 = -2, A
    # = -2. t=1: delta = 1 + 4 / 2 - 2 = 1, A = 1 - 2 / 4 = 0.5. Second sequence: one action token, delta = 3 - 1 = 2.
    advantage_N, return_N = gae(
        torch.tensor([0.0, 1.0, 2.0, 3.0]),
        torch.tensor([0.0, 2.0, 4.0, 1.0]),
        torch.tensor([False, True, True, True]),
        torch.tensor([3, 1]),
        0.5,
        0.5,
    )
    assert advantage_N.tolist() == [0.0, 0.5, -2.0, 2.0]
    assert return_N.tolist() == [0.0, 2.5, 2.0, 3.0]


def test_environment_tokens_are_not_time_steps() -> None:
    # Reward 1 at the end, gamma 1, lambda 0.95, from the last action backwards: A = 1 - 0.4 = 0.6; A = 0.4 - 0.3 + 0.95
    # * 0.6 = 0.67; A = 0.3 - 0.2 + 0.95 * 0.67 = 0.7365; A = 0.2 - 0.1 + 0.95 * 0.7365 = 0.799675.
    value_N = torch.tensor([0.1, 0.2, 7.0, 7.0, 0.3, 0.4])
    mask_N = torch.tensor([1, 1, 0, 0, 1, 1], dtype=torch.bool)
    reward_N = torch.tensor([0.0, 0.0, 5.0, 5.0, 0.0, 1.0])
    advantage_N, return_N = gae(reward_N, value_N, mask_N, torch.tensor([6]), 1.0, 0.95)
    assert advantage_N.tolist() == pytest.approx([0.799675, 0.7365, 0.0, 0.0, 0.67, 0.6])
    assert return_N.tolist() == pytest.approx([0.899675, 0.9365, 0.0, 0.0, 0.97, 1.0])


def test_with_lambda_one_the_return_is_the_discounted_sum_of_rewards() -> None:
    # 1 + 0.5 * (2 + 0.5 * 4) = 3, for any values.
    _, return_N = gae(
        torch.tensor([1.0, 2.0, 4.0]), torch.tensor([9.0, -3.0, 0.5]), torch.ones(3).bool(), torch.tensor([3]), 0.5, 1.0
    )
    assert return_N.tolist() == [3.0, 4.0, 4.0]


def test_masked_entries_may_be_nan() -> None:
    nan = float("nan")
    advantage_N, return_N = gae(
        torch.tensor([nan, 1.0]), torch.tensor([nan, 0.5]), torch.tensor([False, True]), torch.tensor([2]), 1.0, 1.0
    )
    assert advantage_N.tolist() == [0.0, 0.5]
    assert return_N.tolist() == [0.0, 1.0]


def test_sequences_without_actions_and_empty_batches_are_fine() -> None:
    advantage_N, _ = gae(torch.ones(2), torch.ones(2), torch.zeros(2).bool(), torch.tensor([0, 2, 0]), 1.0, 1.0)
    assert advantage_N.tolist() == [0.0, 0.0]
    none = torch.zeros(0)
    assert gae(none, none, none.bool(), none.long(), 1.0, 1.0)[1].tolist() == []


def test_no_gradient_flows_into_advantages() -> None:
    value_N = torch.ones(2, requires_grad=True)
    advantage_N, return_N = gae(torch.ones(2), value_N, torch.ones(2).bool(), torch.tensor([2]), 1.0, 1.0)
    assert not advantage_N.requires_grad
    assert not return_N.requires_grad


@given(sequences, st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_gae_agrees_with_a_scalar_loop(batch: list[list[Token]], gamma: float, lambd: float) -> None:
    reward_N, value_N, mask_N, lengths_B = columns(batch)
    advantage_N, return_N = gae(reward_N, value_N, mask_N, lengths_B, gamma, lambd)
    slow_advantages, slow_returns = slow_gae(batch, gamma, lambd)
    assert advantage_N.tolist() == pytest.approx(slow_advantages, rel=1e-4, abs=1e-4)
    assert return_N.tolist() == pytest.approx(slow_returns, rel=1e-4, abs=1e-4)


def test_gae_rejects_bad_shapes_and_parameters() -> None:
    one = torch.ones(2)
    mask_N = torch.ones(2).bool()
    lengths_B = torch.tensor([2])
    with pytest.raises(ValueError, match=says("gamma=1.5")):
        gae(one, one, mask_N, lengths_B, 1.5, 1.0)
    with pytest.raises(ValueError, match=says("lambd=-1.0")):
        gae(one, one, mask_N, lengths_B, 1.0, -1.0)
    with pytest.raises(ValueError, match=says("lengths_B", "3 tokens", 2)):
        gae(one, one, mask_N, torch.tensor([3]), 1.0, 1.0)
    with pytest.raises(ValueError, match=says("value_N", "[2, 1]", "[2]")):
        gae(one, one.unsqueeze(1), mask_N, lengths_B, 1.0, 1.0)


def test_returns_of_two_sequences_equal_a_calculation_by_hand() -> None:
    # gamma 1/2. First sequence: 1 + (2 + 4 / 2) / 2 = 3, 2 + 4 / 2 = 4, 4. Second sequence, with environment tokens in
    # between: 8 + 6 / 2 = 11 for the action before them, 6 for the one after them.
    reward_N = torch.tensor([99.0, 1.0, 2.0, 4.0, 8.0, 99.0, 99.0, 6.0, 99.0])
    mask_N = torch.tensor([0, 1, 1, 1, 1, 0, 0, 1, 0], dtype=torch.bool)
    return_N = discounted_returns(reward_N, mask_N, torch.tensor([4, 5]), 0.5)
    assert return_N.tolist() == [0.0, 3.0, 4.0, 4.0, 11.0, 0.0, 0.0, 6.0, 0.0]


@pytest.mark.parametrize(
    ("gamma", "expected"), [(1.0, [7.0, 6.0, 4.0]), (0.0, [1.0, 2.0, 4.0]), (0.5, [3.0, 4.0, 4.0])]
)
def test_returns_are_discounted_per_token(gamma: float, expected: list[float]) -> None:
    reward_N = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    return_N = discounted_returns(reward_N, torch.ones(3).bool(), torch.tensor([3]), gamma)
    assert return_N.tolist() == expected
    assert not return_N.requires_grad


def test_a_masked_reward_may_be_nan_and_an_empty_batch_has_no_returns() -> None:
    mask_N = torch.tensor([False, True])
    assert discounted_returns(torch.tensor([math.nan, 1.0]), mask_N, torch.tensor([2]), 1.0).tolist() == [0.0, 1.0]
    none = torch.zeros(0)
    assert discounted_returns(none, none.bool(), none.long(), 1.0).tolist() == []


@given(long_sequences, st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_returns_agree_with_a_scalar_loop(batch: list[list[tuple[bool, float]]], gamma: float) -> None:
    slow: list[float] = []
    for tokens in batch:
        later = 0.0
        part = []
        for acts, reward in reversed(tokens):
            if acts:
                later = reward + gamma * later
            part.append(later if acts else 0.0)
        slow += reversed(part)
    reward_N, _, mask_N, lengths_B = columns([[(acts, reward, 0.0) for acts, reward in part] for part in batch])
    actual = discounted_returns(reward_N, mask_N, lengths_B, gamma)
    assert actual.tolist() == pytest.approx(slow, rel=1e-4, abs=1e-4)
    # With values of 0 and lambda 1 the advantage is the return.
    assert torch.equal(actual, gae(reward_N, torch.zeros_like(reward_N), mask_N, lengths_B, gamma, 1.0)[0])


def test_returns_reject_bad_shapes_and_parameters() -> None:
    with pytest.raises(ValueError, match=says("gamma=-0.1")):
        discounted_returns(torch.ones(2), torch.ones(2).bool(), torch.tensor([2]), -0.1)
    with pytest.raises(ValueError, match=says("lengths_B", "3 tokens", 2)):
        discounted_returns(torch.ones(2), torch.ones(2).bool(), torch.tensor([3]), 1.0)


def test_a_nan_stays_in_its_own_sequence() -> None:
    reward_N = torch.tensor([1.0, 2.0, math.nan, 1.0, 3.0])
    mask_N = torch.ones(5).bool()
    lengths_B = torch.tensor([2, 2, 1])
    actual = discounted_returns(reward_N, mask_N, lengths_B, 0.5)
    assert actual.isnan().tolist() == [False, False, True, False, False]
    advantage_N, _ = gae(reward_N, torch.zeros(5), mask_N, lengths_B, 1.0, 0.0)
    assert advantage_N.isnan().tolist() == [False, False, True, False, False]
    assert turn_returns(reward_N, mask_N, lengths_B, 1.0).isnan().tolist() == [False, False, True, True, False]


def test_the_discount_applies_per_turn_and_not_per_token() -> None:
    # First sequence: turns with rewards 1 + 2 and 8, gamma 1/2: 3 + 8 / 2 = 7 and 8. Second: one turn with 5. Third: 4
    # + 6 / 2 = 7.
    reward_N = torch.tensor([9.0, 1.0, 2.0, 9.0, 8.0, 9.0, 5.0, 0.0, 4.0, 9.0, 9.0, 6.0])
    mask_N = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 1], dtype=torch.bool)
    actual = turn_returns(reward_N, mask_N, torch.tensor([6, 2, 4]), 0.5)
    assert actual.tolist() == [0, 7, 7, 0, 8, 0, 5, 5, 7, 0, 0, 6]


def test_adjacent_turns_are_distinguished_by_their_number() -> None:
    # Turns with rewards 1 + 2 and 8, gamma 1/2: 3 + 8 / 2 = 7 and 8. Without turn numbers they are one turn with 11.
    reward_N = torch.tensor([9.0, 1.0, 2.0, 8.0])
    mask_N = torch.tensor([False, True, True, True])
    lengths_B = torch.tensor([4])
    assert turn_returns(reward_N, mask_N, lengths_B, 0.5).tolist() == [0, 11, 11, 11]
    actual = turn_returns(reward_N, mask_N, lengths_B, 0.5, torch.tensor([0, 1, 1, 2]))
    assert actual.tolist() == [0, 7, 7, 8]
    with pytest.raises(ValueError, match=says("turn_N", "[3]", "[4]")):
        turn_returns(reward_N, mask_N, lengths_B, 0.5, torch.tensor([0, 1, 1]))


@given(long_sequences, st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_turn_returns_agree_with_a_scalar_loop(batch: list[list[tuple[bool, float]]], gamma: float) -> None:
    slow: list[float] = []
    for tokens in batch:
        turns: list[list[int]] = []
        for t, (acts, _) in enumerate(tokens):
            if acts and t and tokens[t - 1][0]:
                turns[-1].append(t)
            elif acts:
                turns.append([t])
        part = [0.0] * len(tokens)
        later = 0.0
        for turn in reversed(turns):
            later = sum(tokens[t][1] for t in turn) + gamma * later
            for t in turn:
                part[t] = later
        slow += part
    reward_N, _, mask_N, lengths_B = columns([[(acts, reward, 0.0) for acts, reward in part] for part in batch])
    actual = turn_returns(reward_N, mask_N, lengths_B, gamma)
    assert actual.tolist() == pytest.approx(slow, rel=1e-4, abs=1e-4)


def test_with_one_turn_all_tokens_of_a_response_have_the_same_return() -> None:
    reward_N = torch.tensor([0.0, 1.0, 2.0])
    mask_N = torch.tensor([False, True, True])
    assert turn_returns(reward_N, mask_N, torch.tensor([3]), 0.0).tolist() == [0.0, 3.0, 3.0]
    none = torch.zeros(0)
    assert turn_returns(none, none.bool(), none.long(), 1.0).tolist() == []
    assert turn_returns(reward_N, torch.zeros(3).bool(), torch.tensor([0, 3]), 1.0).tolist() == [0.0] * 3


def test_a_turn_is_compared_with_the_same_turn_of_other_episodes_of_its_group() -> None:
    # gamma 1/2. Group 7 has three episodes: turns of 1 and 4 with returns 3 and 4; turns of 2 and 0 with returns 2 and
    # 0; one turn with return 7. First turns: 3, 2, 7 with mean 4, so -1, -2, 3. Second turns: 4 and 0 with mean 2, so 2
    # and -2. Group 1 is a single episode: 0.
    reward_N = torch.tensor([9.0, 0.0, 1.0, 9.0, 4.0, 2.0, 9.0, 0.0, 5.0, 9.0, 7.0])
    mask_N = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
    lengths_B = torch.tensor([5, 3, 1, 2])
    group_B = torch.tensor([7, 7, 1, 7])
    actual = turn_advantages(reward_N, mask_N, lengths_B, group_B, 0.5, group_mean_baseline)
    assert actual.tolist() == [0, -1, -1, 0, 2, -2, 0, -2, 0, 0, 3]
    # Minus the mean of the others: 3 - 9/2, 2 - 5, 7 - 5/2; 4 - 0, 0 - 4.
    actual = turn_advantages(reward_N, mask_N, lengths_B, group_B, 0.5, rloo)
    assert actual.tolist() == [0, -1.5, -1.5, 0, 4, -3, 0, -4, 0, 0, 4.5]
    # With separate turn numbers, the first two tokens of the first sequence are turns with rewards 0 and 1, and the
    # third one has 4: returns 0 + (1 + 4/2) / 2 = 1.5, 3 and 4.
    turn_N = torch.tensor([-1, 0, 1, -1, 2, 0, -1, 1, 0, -1, 0])
    actual = turn_advantages(reward_N, mask_N, lengths_B, group_B, 0.5, group_mean_baseline, turn_N)
    assert actual.tolist() == [0, -2, 1.5, 0, 0, -1.5, 0, -1.5, 0, 0, 3.5]
    with pytest.raises(ValueError, match=says("group_B", "[3]", "lengths_B", "[4]")):
        turn_advantages(reward_N, mask_N, lengths_B, group_B[:3], 0.5, group_mean_baseline)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.lists(eighths, min_size=1, max_size=3), max_size=4)),
        max_size=6,
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_turn_advantages_agree_with_a_scalar_loop(batch: list[tuple[int, list[list[float]]]], gamma: float) -> None:
    returns: list[list[float]] = []
    for _, turns in batch:
        later = 0.0
        part = list[float]()
        for turn in reversed(turns):
            later = sum(turn) + gamma * later
            part.insert(0, later)
        returns.append(part)
    slow: list[float] = []
    tokens: list[list[tuple[bool, float, float]]] = []
    for (group, turns), mine in zip(batch, returns, strict=True):
        row = [(False, math.nan, 0.0)]  # a prompt, and feedback after each turn
        expected = [0.0]
        for k, turn in enumerate(turns):
            others = [r[k] for (g, _), r in zip(batch, returns, strict=True) if g == group and len(r) > k]
            row += [*((True, reward, 0.0) for reward in turn), (False, math.nan, 0.0)]
            expected += [mine[k] - sum(others) / len(others)] * len(turn) + [0.0]
        tokens.append(row)
        slow += expected
    reward_N, _, mask_N, lengths_B = columns(tokens)
    group_B = torch.tensor([group for group, _ in batch], dtype=torch.int64)
    actual = turn_advantages(reward_N, mask_N, lengths_B, group_B, gamma, group_mean_baseline)
    assert actual.tolist() == pytest.approx(slow, rel=1e-4, abs=1e-4)


def test_the_optimal_token_baseline_weighs_returns_by_cumulative_energy() -> None:
    # The first response has two tokens with an environment token in between and energies 1 and 1, so W = 1, 2. The
    # second has one token with W = 2. The third is the only one of its group. Returns 1, 1; 3; 5. First tokens: (1 * 1
    # + 2 * 3) / 3. The second token has no counterpart.
    mask_N = torch.tensor([False, True, False, True, True, True])
    lengths_B = torch.tensor([4, 1, 1])
    reward_N = torch.tensor([9.0, 0.0, 9.0, 1.0, 3.0, 5.0])
    energy_N = torch.tensor([9.0, 1.0, 9.0, 1.0, 2.0, 1.0])
    groups = torch.tensor([7, 7, 3])
    advantage_N, return_N = optimal_token_baseline(reward_N, energy_N, mask_N, lengths_B, groups)
    assert advantage_N.tolist() == pytest.approx([0.0, 1 - 7 / 3, 0.0, 1.0, 3 - 7 / 3, 5.0])
    assert return_N.tolist() == [0.0, 1.0, 0.0, 1.0, 3.0, 5.0]


def slow_token_baseline(batch: list[list[Token]], groups: list[int]) -> list[float]:
    """Return advantages, computed by a scalar loop. Tokens are (acts, reward, energy)."""
    values: list[float] = []
    acting = [[(r, e) for a, r, e in tokens if a] for tokens in batch]

    def to_go(actions: list[tuple[float, float]], place: int) -> float:
        return sum(r for r, _ in actions[place:])

    for tokens, group, actions in zip(batch, groups, acting, strict=True):
        place = 0
        for acts, _, _ in tokens:
            if not acts:
                values.append(0.0)
                continue
            beside = [x for x, g in zip(acting, groups, strict=True) if g == group and len(x) > place]
            weights = [sum(e for _, e in x[: place + 1]) for x in beside]
            weighed = sum(w * to_go(x, place) for w, x in zip(weights, beside, strict=True))
            baseline = weighed / (sum(weights) + 1e-8) if len(beside) > 1 else 0.0
            values.append(to_go(actions, place) - baseline)
            place += 1
    return values


@given(sequences, st.lists(st.integers(0, 2), min_size=6, max_size=6))
@settings(max_examples=60, deadline=None)
def test_the_optimal_token_baseline_agrees_with_a_scalar_loop(batch: list[list[Token]], groups: list[int]) -> None:
    # Energies are positive. They are small for a token that is nearly certain.
    batch = [[(acts, reward, abs(energy) + 0.125) for acts, reward, energy in tokens] for tokens in batch]
    reward_N, energy_N, mask_N, lengths_B = columns(batch)
    actual, _ = optimal_token_baseline(reward_N, energy_N, mask_N, lengths_B, torch.tensor(groups[: len(batch)]).long())
    assert actual.tolist() == pytest.approx(slow_token_baseline(batch, groups[: len(batch)]), rel=1e-4, abs=1e-4)


@given(sequences)
@settings(max_examples=30, deadline=None)
def test_equal_returns_of_a_group_leave_no_optimal_token_advantage(batch: list[list[Token]]) -> None:
    # One reward at the last action token: for any energies, all tokens at one position have the same return.
    batch = [tokens for tokens in batch if any(acts for acts, _, _ in tokens)] * 2
    reward_N, energy_N, mask_N, lengths_B = columns(batch)
    last = [max(t for t, (acts, _, _) in enumerate(tokens) if acts) for tokens in batch]
    reward_N = torch.zeros_like(reward_N)
    reward_N[(lengths_B.cumsum(0) - lengths_B + torch.tensor(last).long()).long()] = 0.75
    groups = torch.zeros(len(batch), dtype=torch.int64)
    actual, _ = optimal_token_baseline(reward_N, energy_N.abs() + 0.125, mask_N, lengths_B, groups)
    assert actual.abs().max() < 1e-5 if len(actual) else True


def test_the_optimal_token_baseline_of_an_empty_batch_is_empty() -> None:
    none = torch.zeros(0)
    empty = (none.bool(), none.long(), none.long())
    assert [x.tolist() for x in optimal_token_baseline(none, none, *empty)] == [[], []]


def test_remax_subtracts_the_reward_of_the_greedy_response() -> None:
    # Returns 3 and 2, minus 0.5, and 4 minus 5.
    reward_N = torch.tensor([9.0, 1.0, 2.0, 4.0])
    mask_N = torch.tensor([False, True, True, True])
    lengths_B = torch.tensor([3, 1])
    advantage_N, return_N = remax(reward_N, torch.tensor([0.5, 5.0]), mask_N, lengths_B)
    assert advantage_N.tolist() == [0.0, 2.5, 1.5, -1.0]
    assert return_N.tolist() == [0.0, 3.0, 2.0, 4.0]
    with pytest.raises(ValueError, match=says("greedy_reward_B", "[3]", "[2]")):
        remax(reward_N, torch.zeros(3), mask_N, lengths_B)


@given(sequences, st.lists(st.floats(-2, 2), min_size=6, max_size=6))
@settings(max_examples=60, deadline=None)
def test_remax_agrees_with_a_scalar_loop(batch: list[list[Token]], baselines: list[float]) -> None:
    slow: list[float] = []
    for tokens, baseline in zip(batch, baselines, strict=False):
        slow += [
            sum(r for a, r, _ in tokens[t:] if a) - baseline if acts else 0.0 for t, (acts, _, _) in enumerate(tokens)
        ]
    reward_N, _, mask_N, lengths_B = columns(batch)
    actual, _ = remax(reward_N, torch.tensor(baselines[: len(batch)]), mask_N, lengths_B)
    assert actual.tolist() == pytest.approx(slow, rel=1e-4, abs=1e-4)


@given(sequences, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_returns_do_not_depend_on_sequence_order_or_environment_tokens(
    batch: list[list[Token]], random: Random
) -> None:
    changed = [
        [(acts, r if acts else random.choice([math.nan, math.inf, 3.0]), v if acts else math.nan) for acts, r, v in s]
        for s in batch
    ]
    order = random.sample(range(len(batch)), len(batch))
    for estimate in (
        lambda r, v, m, n: gae(r, v, m, n, 0.9, 0.8)[0],
        lambda r, v, m, n: discounted_returns(r, m, n, 0.9) + 0 * v.nan_to_num(),
        lambda r, v, m, n: turn_returns(r, m, n, 0.9) + 0 * v.nan_to_num(),
    ):
        one = columns(batch)
        other = columns([changed[i] for i in order])
        before = dict(enumerate(estimate(*one).split(one[3].tolist())))
        after = dict(zip(order, estimate(*other).split(other[3].tolist()), strict=True))
        for i in order:
            torch.testing.assert_close(after[i], before[i], rtol=1e-5, atol=1e-6)


def test_whitening_uses_only_action_tokens() -> None:
    # 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5.
    x_N = torch.tensor([1.0, float("nan"), 3.0, 5.0, 1000.0, 7.0])
    mask_N = torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
    a = 3 / math.sqrt(5)
    b = 1 / math.sqrt(5)
    assert whiten(x_N, mask_N).tolist() == pytest.approx([-a, 0.0, -b, b, 0.0, a])
    assert whiten(x_N, mask_N, scale=False).tolist() == [-3.0, 0.0, -1.0, 1.0, 0.0, 3.0]


def test_the_unbiased_variance_divides_by_n_minus_1() -> None:
    # 1 and 3: mean 2, variance (1 + 1) / 1 = 2.
    x_N = torch.tensor([1.0, 3.0])
    mask_N = torch.ones(2).bool()
    assert whiten(x_N, mask_N, unbiased=True).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert whiten(torch.tensor([5.0]), torch.tensor([True]), unbiased=True).tolist() == [0.0]


def test_whitening_of_equal_values_gives_zero() -> None:
    # In float32 the mean of a thousand numbers 1000.1 is not exactly that number. The difference must not be scaled up.
    for count, number in ((3, 0.7), (1000, 1000.1), (3, 100000.3), (7, -1e30)):
        assert whiten(torch.full((count,), number), torch.ones(count).bool()).tolist() == [0.0] * count
    # Squares do not overflow: mean 0, deviation 1e20.
    assert whiten(torch.tensor([1e20, -1e20]), torch.ones(2).bool()).tolist() == pytest.approx([1.0, -1.0])
    assert whiten(torch.tensor([5.0]), torch.tensor([True])).tolist() == [0.0]
    assert whiten(torch.tensor([5.0]), torch.tensor([False])).tolist() == [0.0]


@given(st.lists(st.tuples(st.booleans(), eighths), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_whitening_agrees_with_a_scalar_loop(tokens: list[tuple[bool, float]]) -> None:
    chosen = [x for keep, x in tokens if keep]
    mean = sum(chosen) / max(1, len(chosen))
    variance = sum((x - mean) ** 2 for x in chosen) / max(1, len(chosen))
    slow = [(x - mean) / math.sqrt(max(variance, 1e-8)) if keep else 0.0 for keep, x in tokens]
    actual = whiten(torch.tensor([x for _, x in tokens]), torch.tensor([keep for keep, _ in tokens]))
    assert actual.tolist() == pytest.approx(slow, rel=1e-4, abs=1e-4)
