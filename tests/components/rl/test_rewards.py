"""Rewards per token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rl.rewards import token_rewards

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
    # Two sequences: prompt, act, act; and prompt, act, environment, act, environment.
    mask_N = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0], dtype=torch.bool)
    kl_N = torch.tensor([9.0, 1.0, -2.0, 9.0, 4.0, 9.0, 8.0, 9.0])
    found = token_rewards(torch.tensor([1.0, 2.0]), kl_N, 0.25, mask_N, torch.tensor([3, 5]))
    assert found.tolist() == [0.0, -0.25, 1.5, 0.0, -1.0, 0.0, 0.0, 0.0]


def test_a_sequence_without_an_action_token_earns_nothing() -> None:
    mask_N = torch.tensor([0, 0, 1], dtype=torch.bool)
    found = token_rewards(torch.tensor([5.0, 7.0, 1.0]), None, 0.1, mask_N, torch.tensor([2, 0, 1]))
    assert found.tolist() == [0.0, 0.0, 1.0]


def test_a_divergence_outside_the_mask_is_not_read() -> None:
    mask_N = torch.tensor([False, True])
    kl_N = torch.tensor([float("nan"), 1.0])
    assert token_rewards(torch.tensor([1.0]), kl_N, 0.5, mask_N, torch.tensor([2])).tolist() == [0.0, 0.5]


def test_a_coefficient_of_zero_ignores_an_infinite_divergence() -> None:
    kl_N = torch.tensor([float("inf")])
    assert token_rewards(torch.ones(1), kl_N, 0.0, torch.ones(1).bool(), torch.tensor([1])).tolist() == [1.0]


def test_no_sequences_have_no_rewards() -> None:
    none = torch.zeros(0)
    assert token_rewards(none, none, 0.1, none.bool(), none.long()).tolist() == []


@given(sequences, st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_rewards_agree_with_a_scalar_loop(batch: Sequences, kl_coef: float) -> None:
    tokens = [token for _, part in batch for token in part]
    found = token_rewards(
        torch.tensor([reward for reward, _ in batch]),
        torch.tensor([kl for _, kl in tokens]),
        kl_coef,
        torch.tensor([acts for acts, _ in tokens], dtype=torch.bool),
        torch.tensor([len(part) for _, part in batch], dtype=torch.int64),
    )
    assert found.tolist() == pytest.approx(slow_token_rewards(batch, kl_coef), abs=1e-5)


def test_sizes_that_disagree_are_named() -> None:
    mask_N = torch.ones(3).bool()
    with pytest.raises(ValueError, match=r"reward_B has shape \[1\] .* 2 sequences of 3 tokens"):
        token_rewards(torch.ones(1), None, 0.0, mask_N, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"action_mask_N \[3\], but there are 2 sequences of 4 tokens"):
        token_rewards(torch.ones(2), None, 0.0, mask_N, torch.tensor([2, 2]))
    with pytest.raises(ValueError, match=r"kl_N has shape \[1\]"):
        token_rewards(torch.ones(2), torch.ones(1), 0.0, mask_N, torch.tensor([1, 2]))
