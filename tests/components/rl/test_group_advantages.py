"""Advantages relative to the other responses to one prompt. B responses."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rl.advantages import group_mean_baseline, group_norm, group_std, rloo
from components.rl.group_advantages import gdpo, gpg, grpo_passk, opo
from tests.messages import says

# A strategy with few different rewards and groups, so that equal rewards, large groups and single responses all occur.
responses = st.lists(
    st.tuples(st.sampled_from([-(10**12), -1, 0, 3, 2**40]), st.sampled_from([-1.5, 0.0, 0.1, 0.3, 1.0, 1000.1])),
    max_size=40,
)
rewards_of_two = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from([-1.0, 0.0, 2.0])), max_size=20
)


def opo_of_equal_lengths(reward_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    return opo(reward_B, torch.full_like(group_B, 5), group_B)


Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ESTIMATORS: dict[str, Estimator] = {
    "group_mean_baseline": group_mean_baseline,
    "rloo": rloo,
    "group_norm": group_norm,
    "opo": opo_of_equal_lengths,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "group_std": group_std,
}


@pytest.mark.parametrize(
    ("rewards", "groups", "mean_baseline", "left_out", "normed"),
    [
        # Mean 3. The means of the others are 4 and 2, and 1 - 4 = -3. Standard deviation of 1, 3, 5: sqrt((4 + 0 + 4) /
        # 2) = 2.
        ([1, 3, 5], [7, 7, 7], [-2, 0, 2], [-3, 0, 3], [-1, 0, 1]),
        # Groups are interleaved: 4 and 0 (mean 2, deviation sqrt(8)) in group 9, 1 and 1 in group -2.
        ([4, 1, 0, 1], [9, -2, 9, -2], [2, 0, -2, 0], [4, 0, -4, 0], [0.5**0.5, 0, -(0.5**0.5), 0]),
        # Groups of different sizes: 1, 0, 0, 0 (mean 1/4, deviation sqrt((9 + 3) / 16 / 3) = 1/2), and a single
        # response.
        (
            [1, 8, 0, 0, 0],
            [0, 1, 0, 0, 0],
            [0.75, 0, -0.25, -0.25, -0.25],
            [1, 0] + [-1 / 3] * 3,
            [1.5, 0] + [-0.5] * 3,
        ),
        ([-5], [3], [0], [0], [0]),
        ([2, 2, 2], [1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]),
        ([], [], [], [], []),
    ],
)
def test_baselines_of_groups_equal_a_calculation_by_hand(
    rewards: list[float], groups: list[int], mean_baseline: list[float], left_out: list[float], normed: list[float]
) -> None:
    reward_B = torch.tensor(rewards, dtype=torch.float32)
    group_B = torch.tensor(groups, dtype=torch.int64)
    assert group_mean_baseline(reward_B, group_B).tolist() == pytest.approx(mean_baseline)
    assert rloo(reward_B, group_B).tolist() == pytest.approx(left_out)
    assert group_norm(reward_B, group_B, 1e-9).tolist() == pytest.approx(normed, abs=1e-6)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-30, 7.7e30, -1000.1])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_rewards_all_equal_give_exactly_zero(name: str, reward: float) -> None:
    # The float32 sum of seven numbers 0.1, divided by 7, is not exactly 0.1. The difference over 1e-9 must not become
    # an advantage.
    for size in (1, 2, 3, 7, 49):
        reward_B = torch.full((size + 2,), reward)
        reward_B[-2:] = torch.tensor([0.0, 1.0])
        group_B = torch.tensor([4] * size + [5, 5])
        assert ESTIMATORS[name](reward_B, group_B)[:size].tolist() == [0.0] * size


def slow_estimate(name: str, reward: float, group: list[float], telling: float) -> float:
    """Advantages by a scalar loop. `telling` is the ratio of all responses to those in groups with unequal rewards."""
    n = len(group)
    if n == 1 or len(set(group)) == 1:
        return 0.0
    mean = sum(group) / n
    std = math.sqrt(sum((x - mean) ** 2 for x in group) / (n - 1))
    if name == "group_std":
        return std
    if name == "grpo_passk":
        second, best = sorted(group)[-2:]
        return (best - second) / (std + 1e-6) if reward == best else 0.0
    if name == "gpg":
        return telling * (reward - mean)
    if name in ("group_mean_baseline", "opo"):
        return reward - mean
    if name == "rloo":
        return reward - (sum(group) - reward) / (n - 1)
    return (reward - mean) / (std + 1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(batch=responses)
@settings(max_examples=60, deadline=None)
def test_baselines_agree_with_a_scalar_loop(name: str, batch: list[tuple[int, float]]) -> None:
    reward_B = torch.tensor([reward for _, reward in batch], dtype=torch.float32)
    group_B = torch.tensor([group for group, _ in batch], dtype=torch.int64)
    found_B = ESTIMATORS[name](reward_B, group_B)
    rewards = reward_B.tolist()
    groups = group_B.tolist()
    members = {group: [r for r, other in zip(rewards, groups, strict=True) if other == group] for group in groups}
    telling = len(rewards) / max(1, sum(len(set(members[group])) > 1 for group in groups))
    for i, group in enumerate(groups):
        slow = slow_estimate(name, rewards[i], members[group], telling)
        assert found_B[i].item() == pytest.approx(slow, rel=1e-5, abs=1e-5)
    assert found_B.dtype == torch.float32


@pytest.mark.parametrize("name", ESTIMATORS)
def test_baselines_have_no_gradient_and_reject_bad_shapes(name: str) -> None:
    reward_B = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not ESTIMATORS[name](reward_B, torch.tensor([0, 0])).requires_grad
    with pytest.raises(ValueError, match=says("reward_B", "[2]", "[3]")):
        ESTIMATORS[name](reward_B, torch.tensor([0, 0, 0]))
    with pytest.raises(ValueError, match=says("reward_B", "[2, 1]")):
        ESTIMATORS[name](reward_B[:, None], torch.tensor([[0], [0]]))
    with pytest.raises(ValueError, match=says("group_B", "torch.float32", "integer")):
        ESTIMATORS[name](reward_B, torch.zeros(2))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_order_of_responses_does_not_matter(name: str) -> None:
    reward_B = torch.tensor([0.3, 1.0, 0.0, 1.0, 0.25, 7.0])
    group_B = torch.tensor([1, 2, 1, 2, 2, 9])
    order = torch.tensor([5, 3, 0, 4, 1, 2])
    assert torch.equal(ESTIMATORS[name](reward_B[order], group_B[order]), ESTIMATORS[name](reward_B, group_B)[order])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_nan_reward_stays_in_its_group(name: str) -> None:
    found_B = ESTIMATORS[name](torch.tensor([math.nan, 1.0, 0.0, 1.0]), torch.tensor([4, 4, 8, 8]))
    assert found_B.isnan().tolist() == [True, True, False, False]


def test_rewards_that_differ_only_by_rounding_have_tiny_advantages() -> None:
    # One of four is larger than 1 by 2^-23: 0.75 * 2^-23 over the deviation 2^-24 plus 1e-4 is 0.0009; plus 1e-9 it is
    # 1.5.
    reward_B = torch.tensor([1.0, 1.0, 1.0, 1.0 + 2**-23])
    group_B = torch.zeros(4, dtype=torch.int64)
    assert group_norm(reward_B, group_B).abs().max() == pytest.approx(0.0009, abs=1e-5)
    assert group_norm(reward_B, group_B, 1e-9).max() > 1.4


def test_a_larger_epsilon_makes_advantages_smaller() -> None:
    # 1 and 0: mean 1/2, deviation 0.707107; 0.5 / 1.207107 = 0.414214.
    reward_B = torch.tensor([1.0, 0.0, 3.0])
    group_B = torch.tensor([1, 1, 2])
    assert group_norm(reward_B, group_B, 0.5).tolist() == pytest.approx([0.414214, -0.414214, 0.0], abs=1e-6)


def test_long_responses_have_more_weight_in_the_baseline_of_opo() -> None:
    # (10 * 1 + 30 * 0) / 40 = 1/4. The other group: (1 * 2 + 1 * 4 + 2 * 7) / 4 = 5. Also a single response, and two
    # without tokens.
    found_B = opo(
        torch.tensor([1.0, 0.0, 2.0, 4.0, 7.0, 3.0, 1.0, 5.0]),
        torch.tensor([10, 30, 1, 1, 2, 9, 0, 0]),
        torch.tensor([0, 0, 1, 1, 1, 2, 3, 3]),
    )
    assert found_B.tolist() == pytest.approx([0.75, -0.25, -3.0, -1.0, 2.0, 0.0, -2.0, 2.0])


@given(responses, st.lists(st.integers(0, 40), min_size=40, max_size=40))
@settings(max_examples=60, deadline=None)
def test_opo_agrees_with_a_scalar_loop(batch: list[tuple[int, float]], lengths: list[int]) -> None:
    rewards = [reward for _, reward in batch]
    groups = [group for group, _ in batch]
    actual = opo(torch.tensor(rewards), torch.tensor(lengths[: len(batch)]), torch.tensor(groups, dtype=torch.int64))
    for i, group in enumerate(groups):
        members = [(r, n) for r, n, other in zip(rewards, lengths, groups, strict=False) if other == group]
        tokens = sum(n for _, n in members)
        baseline = sum(r for r, _ in members) / len(members)
        if tokens:
            baseline = sum(r * n for r, n in members) / tokens
        assert actual[i].item() == pytest.approx(rewards[i] - baseline, rel=1e-4, abs=1e-3)


def test_groups_of_equal_rewards_do_not_dilute_gpg() -> None:
    # Four responses, two of them in an informative group: its differences of 1/2 count twice. The weight is limited to
    # 2.
    reward_B = torch.tensor([1.0, 0.0, 1.0, 1.0])
    group_B = torch.tensor([0, 0, 1, 1])
    assert gpg(reward_B, group_B).tolist() == [1.0, -1.0, 0.0, 0.0]
    assert gpg(reward_B, group_B, scale=2.0).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert gpg(torch.ones(3), torch.zeros(3).long()).tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="scale=0"):
        gpg(reward_B, group_B, scale=0)


def test_only_the_single_best_response_has_a_pass_at_k_advantage() -> None:
    # 5 is ahead of 3 by 2. The deviation of 1, 3, 5 is 2. Two equal best responses, and a single response, have no
    # lead.
    reward_B = torch.tensor([1.0, 5.0, 3.0, 1.0, 1.0, 0.0, 9.0])
    group_B = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    assert grpo_passk(reward_B, group_B, divide_by_std=False).tolist() == [0, 2, 0, 0, 0, 0, 0]
    assert grpo_passk(reward_B, group_B).tolist() == pytest.approx([0, 1, 0, 0, 0, 0, 0], abs=1e-6)


def test_each_reward_is_normalised_before_they_are_summed() -> None:
    # In group 0 both rewards become +-1/sqrt(2), of opposite sign, one with twice the weight: -+1/sqrt(2). In group 1
    # only the first reward differs: +-1/sqrt(2). Mean 0, population variance 1/2: +-1.
    reward_BK = torch.tensor([[100.0, 0.0], [0.0, 1.0], [1.0, 5.0], [0.0, 5.0]])
    found_B = gdpo(reward_BK, torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 2.0]))
    assert found_B.tolist() == pytest.approx([-1.0, 1.0, 1.0, -1.0], abs=1e-5)


@given(rewards_of_two)
@settings(max_examples=60, deadline=None)
def test_gdpo_agrees_with_a_scalar_loop(rows: list[tuple[int, float, float]]) -> None:
    weights = (0.75, 0.5)
    sums = [0.0] * len(rows)
    for k, weight in enumerate(weights, 1):
        for i, row in enumerate(rows):
            members = [other[k] for other in rows if other[0] == row[0]]
            mean = sum(members) / len(members)
            std = math.sqrt(sum((x - mean) ** 2 for x in members) / max(1, len(members) - 1))
            sums[i] += weight * (row[k] - mean) / (std + 1e-6)
    mean = sum(sums) / max(1, len(sums))
    variance = sum((x - mean) ** 2 for x in sums) / max(1, len(sums))
    slow = [(x - mean) / math.sqrt(max(variance, 1e-8)) for x in sums]
    reward_BK = torch.tensor([row[1:] for row in rows]).reshape(len(rows), 2)
    group_B = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    assert gdpo(reward_BK, group_B, torch.tensor(weights)).tolist() == pytest.approx(slow, rel=1e-3, abs=1e-3)


def test_rewards_and_weights_of_gdpo_must_match() -> None:
    with pytest.raises(ValueError, match=says("reward_BK", "[2]", "weight_K", "[1]", "[B, K]", "[K]")):
        gdpo(torch.ones(2), torch.zeros(2).long(), torch.ones(1))
    with pytest.raises(ValueError, match=says("weight_K", "[3]")):
        gdpo(torch.ones(2, 2), torch.zeros(2).long(), torch.ones(3))
