"""Difficulty of prompts, the draw by it, its state, and refused options."""

import json

import numpy as np
import pytest

from plugins.curriculum.difficulty import Difficulty
from recipes.grpo.main import read_config
from tests.messages import says

ROWS = np.arange(100)


def judged(scores: list[float]) -> Difficulty:
    """Return the state after one visit of the first rows."""
    difficulty = Difficulty.of(len(ROWS), decay=0.5)
    for row, score in enumerate(scores):
        difficulty.update(row, score)
    return difficulty


def test_the_mean_decays_and_scores_are_cut_to_0_and_1() -> None:
    difficulty = judged([3.0])
    assert difficulty.mean[0] == 1
    difficulty.update(0, 0.5)
    difficulty.update(0, -2.0)
    assert (difficulty.mean[0], difficulty.visits[0]) == (0.375, 3)


def test_prompts_are_drawn_in_proportion_to_the_variance() -> None:
    # Weights: 0.25 for p = 1/2, 0.09 for p = 0.1, the floor 0.01 for p = 0 and p = 1.
    difficulty = judged([0.5, 0.1, 0.0, 1.0])
    counts = np.zeros(4)
    for seed in range(4000):
        counts[difficulty.draw_by_variance(ROWS[:4], 1, 0.01, np.random.default_rng(seed))] += 1
    assert counts / 4000 == pytest.approx(np.array([0.25, 0.09, 0.01, 0.01]) / 0.36, abs=0.03)


def test_a_draw_has_different_prompts_and_unseen_ones_come_before_hopeless_ones() -> None:
    difficulty = judged([0.0] * 50)
    drawn = difficulty.draw_by_variance(ROWS, 50, 0.0, np.random.default_rng(1))
    assert sorted(drawn) == list(range(50, 100))
    assert len(set(difficulty.draw_by_variance(ROWS, 100, 0.0, np.random.default_rng(1)))) == 100


def test_pools_have_fixed_shares_and_missing_prompts_come_from_the_others() -> None:
    difficulty = judged([1.0] * 30 + [0.0] * 30 + [0.5] * 3)
    seen = ROWS[:63]
    drawn = difficulty.draw_from_pools(seen, 10, (0.2, 0.3, 0.5), np.random.default_rng(0))
    mean = difficulty.mean[drawn]
    assert [int((mean == p).sum()) for p in (1, 0.5, 0)] == [2, 3, 5]
    # Only three are of middle difficulty.
    drawn = difficulty.draw_from_pools(seen, 10, (0.0, 1.0, 0.0), np.random.default_rng(0))
    assert len(set(drawn)) == 10
    assert int((difficulty.mean[drawn] == 0.5).sum()) == 3


def test_the_state_is_restored_to_the_bit() -> None:
    difficulty = judged([1 / 3, 0.1, 0.7])
    difficulty.update(1, 2 / 7)
    other = Difficulty.of(len(ROWS), decay=0.5)
    other.load_state_dict(json.loads(json.dumps(difficulty.state_dict())))
    assert np.array_equal(other.mean, difficulty.mean)
    assert np.array_equal(other.visits, difficulty.visits)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ("algorithm.filter_range=[0.0,1.0]", ["data.curriculum=variance", "algorithm.filter_range"]),
        ("data.shuffle=false", ["data.curriculum=variance", "data.shuffle=false"]),
        ("curriculum.shares=[0.5,0.6,0.2]", ["curriculum.shares=[0.5, 0.6, 0.2]", "sum to 1"]),
        ("curriculum.shares=[0.1,0.8,0.1]", ["curriculum=variance", "does not read curriculum.shares"]),
        ("data.curriculum=pools curriculum.floor=0.1", ["curriculum=pools", "does not read curriculum.floor"]),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: str, facts: list[str]) -> None:
    words = ["model.path=m", "data.path=d", "reward.source=exact_match", "data.curriculum=variance", *options.split()]
    with pytest.raises(ValueError, match=says(*facts)):
        read_config(words)
