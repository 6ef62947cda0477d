"""Rewards of sequences, shaped, and of their tokens. B sequences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.rl.rewards import overlong_penalty, stop_properly_penalty, token_rewards

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


@pytest.mark.parametrize(
    ("length", "expected"),
    # At most 20 tokens, the last 4 of them penalised, at most by 2: half a reward per token from the 17th on.
    [(0, 1.0), (15, 1.0), (16, 1.0), (17, 0.5), (18, 0.0), (19, -0.5), (20, -1.0), (21, -1.0), (4000, -1.0)],
)
def test_the_overlong_penalty_rises_over_the_buffer(length: int, expected: float) -> None:
    reward_B = torch.tensor([1.0, -3.0])
    found = overlong_penalty(reward_B, torch.tensor([length, 1]), max_length=20, buffer_length=4, factor=2.0)
    assert found.tolist() == [expected, -3.0]
    assert reward_B.tolist() == [1.0, -3.0]


@given(
    st.lists(st.tuples(st.floats(-3, 3, width=32), st.integers(0, 60)), max_size=40),
    st.integers(1, 40),
    st.integers(0, 20),
    st.floats(0, 4),
)
@settings(max_examples=100, deadline=None)
def test_overlong_penalties_agree_with_a_scalar_loop(
    answers: list[tuple[float, int]], buffer: int, before: int, factor: float
) -> None:
    slow = []
    for reward, length in answers:
        exceed = min(length - before, buffer)
        slow.append(reward - exceed / buffer * factor if exceed > 0 else reward)
    found = overlong_penalty(
        torch.tensor([reward for reward, _ in answers]),
        torch.tensor([length for _, length in answers], dtype=torch.int64),
        before + buffer,
        buffer,
        factor,
    )
    assert found.tolist() == pytest.approx(slow, abs=1e-5)


@pytest.mark.parametrize(
    ("coef", "expected"),
    [(1.0, [2.0, 2.0, -4.0]), (0.25, [2.0, 0.5, -1.0]), (0.0, [2.0, 0.0, 0.0]), (-0.5, [2.0, -0.5, -0.5])],
)
def test_truncated_answers_earn_a_share_or_a_fixed_negative_reward(coef: float, expected: list[float]) -> None:
    found = stop_properly_penalty(torch.tensor([2.0, 2.0, -4.0]), torch.tensor([False, True, True]), coef)
    assert found.tolist() == expected


@given(st.lists(st.tuples(st.floats(-3, 3, width=32), st.booleans()), max_size=40), st.floats(-3, 1))
@settings(max_examples=100, deadline=None)
def test_penalties_of_truncation_agree_with_a_scalar_loop(answers: list[tuple[float, bool]], coef: float) -> None:
    slow = [reward if not cut else reward * coef if coef >= 0 else coef for reward, cut in answers]
    found = stop_properly_penalty(
        torch.tensor([reward for reward, _ in answers]),
        torch.tensor([cut for _, cut in answers], dtype=torch.bool),
        coef,
    )
    assert found.tolist() == pytest.approx(slow, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((20, 0, 1.0), "buffer_length=0; set 1 to max_length=20 tokens"),
        ((20, 21, 1.0), "buffer_length=21; set 1 to max_length=20 tokens"),
        ((20, 4, -1.0), r"factor=-1\.0; set the reward that the longest answer loses, 0 or more"),
        ((20, 4, math.nan), "factor=nan"),
    ],
)
def test_an_overlong_penalty_that_cannot_be_is_named(settings: tuple[int, int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.ones(2), torch.tensor([1, 2]), *settings)


def test_penalties_of_sizes_that_disagree_or_without_sense_are_named() -> None:
    with pytest.raises(ValueError, match=r"reward_B has shape \[2\], response_length_B \[3\]; both must be \[B\]"):
        overlong_penalty(torch.ones(2), torch.ones(3), 20, 4, 1.0)
    with pytest.raises(ValueError, match=r"reward_B has shape \[2\], truncated_B \[1\]"):
        stop_properly_penalty(torch.ones(2), torch.ones(1).bool(), 0.5)
    with pytest.raises(ValueError, match=r"truncated_B is torch\.float32; it must be bool"):
        stop_properly_penalty(torch.ones(2), torch.ones(2), 0.5)
    for coef in (1.5, math.nan, -math.inf):
        with pytest.raises(ValueError, match=f"coef={coef}; set 0 to 1 to scale"):
            stop_properly_penalty(torch.ones(2), torch.ones(2).bool(), coef)
