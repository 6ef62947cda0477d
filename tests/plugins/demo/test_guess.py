"""The guessing game: bisection wins, and an invalid guess costs a turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.demo import guess
from plugins.demo.tasks import GuessTask
from tests.agents.environment_cases import halving, play_untrained, rewards, run_episodes, saying, write_policy


@pytest.mark.parametrize("row", GuessTask().rows("train", 20, seed=1))
def test_bisection_guesses_every_number_within_the_turns(row: dict[str, str]) -> None:
    limit = GuessTask().limit_of(row["input"])
    steps = run_episodes(guess.AgentInstance(), row["input"], row["label"], halving(1, limit, "<", ">"))
    assert rewards(steps) == [0.0] * (len(steps) - 1) + [1.0]
    assert steps[-1]["scores"] == 1.0 and len(steps) <= GuessTask.turns


def test_a_lost_game_ends_after_its_turns_and_a_turn_without_a_number_counts() -> None:
    steps = run_episodes(guess.AgentInstance(), "abc12:", "7", saying("12", "<", "", "3"))
    assert [step["environment_feedback"] for step in steps] == ["<", ":", ":", ">"]
    assert rewards(steps) == [0.0] * 4
    assert [step["done"] for step in steps] == [False, False, False, True]
    assert steps[-1]["extra_logs"] == {"guesses": 4, "invalid_guesses": 2}


def test_all_feedback_of_the_guessing_game_is_in_the_alphabet_of_its_task() -> None:
    for said in ("9" * 5000, "x", "3", "7", "٣"):
        (step,) = run_episodes(guess.AgentInstance(), "abc12:", "5", saying(said), turns=1)
        assert set(step["environment_feedback"]) <= set(GuessTask.alphabet)


def test_an_untrained_policy_plays_without_errors(tmp_path: Path) -> None:
    play_untrained("guess", "7", write_policy(tmp_path))
