"""Environments of game libraries: correct play wins, wrong play does not, and nonsense gets a reply."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.agents.environment_cases import halving, play_untrained, rewards, run_episodes, saying, text_of, write_policy
from tests.messages import says

pytestmark = pytest.mark.full

LAKE = {"env": "FrozenLake-v1", "seed": 3, "options": {"is_slippery": False}}
NUMBER = {"env": "GuessTheNumber-v0", "seed": 3}


@pytest.fixture
def textarena() -> ModuleType:
    """Import the environment. It needs the package with this name."""
    from agents.environments import textarena

    return textarena


@pytest.fixture
def gymnasium() -> ModuleType:
    """Import the environment. It needs the package with this name."""
    from agents.environments import gymnasium

    return gymnasium


# textarena


def test_correct_play_wins_a_game_of_textarena_and_wrong_play_does_not(textarena: ModuleType) -> None:
    steps = run_episodes(
        textarena.AgentInstance(), "Play.", json.dumps(NUMBER), halving(1, 20, "lower", "higher", "I say [{}].")
    )
    assert rewards(steps) == [0.0] * (len(steps) - 1) + [1.0] and steps[-1]["scores"] == 1.0
    # Two consecutive invalid moves end the game.
    lost = run_episodes(textarena.AgentInstance(), "Play.", NUMBER, saying("99", "no"))
    assert rewards(lost) == [0.0, 0.0] and lost[-1]["done"]
    assert "invalid move" in text_of(lost[0]["environment_feedback"])
    assert lost[-1]["extra_logs"] == {"invalid_move": 1.0}


def test_brackets_are_added_to_a_move_and_the_feedback_does_not_repeat_it(textarena: ModuleType) -> None:
    (step,) = run_episodes(textarena.AgentInstance(), "Play.", NUMBER, saying(" 20 "), turns=1)
    assert text_of(step["environment_feedback"]) == "The target number is lower.\n"


def test_the_rules_follow_the_prompt_and_the_seed_determines_the_game(textarena: ModuleType) -> None:
    def begin(label: dict[str, Any]) -> str:
        return text_of(
            asyncio.run(textarena.AgentInstance().reset({"observation": "Hi.", "label": label}))["observation"]
        )

    games = [begin({"env": "FifteenPuzzle-v0", "seed": seed}) for seed in (1, 1, 2)]
    assert games[0].startswith("Hi.\n\nYou are")
    assert games[0] == games[1] != games[2]


def test_concurrent_games_equal_sequential_ones_and_keep_the_global_random_state(textarena: ModuleType) -> None:
    async def boards(pool: list[Any]) -> list[list[str]]:
        """Return the boards of 2048, which draws a random tile after each move."""
        for environment in pool:
            await environment.reset({"observation": "", "label": {"env": "2048-v0", "seed": 5}})
        said: list[list[str]] = [[] for _ in pool]
        for move in ("up", "left", "down"):
            for environment, seen in zip(pool, said):
                seen.append(text_of((await environment.step({"action_text": move}))["environment_feedback"]))
        return said

    random.seed(7)
    before = random.getstate()
    (alone,) = asyncio.run(boards([textarena.AgentInstance()]))
    assert asyncio.run(boards([textarena.AgentInstance() for _ in range(3)])) == [alone] * 3
    assert random.getstate() == before


def test_every_listed_game_runs_without_a_download(textarena: ModuleType) -> None:
    for game in textarena.GAMES.split():
        (step,) = run_episodes(textarena.AgentInstance(), "", {"env": f"{game}-v0", "seed": 1}, saying("1"), turns=1)
        assert -1.0 <= step["rewards"] <= 1.0, game
        assert text_of(step["environment_feedback"]).strip(), game


@pytest.mark.parametrize("name", ["TicTacToe-v0", "Wordle-v0", "Countdown-v0", "GuessTheNumber", "Nonsense-v0"])
def test_games_of_several_players_or_with_downloads_raise_an_error(textarena: ModuleType, name: str) -> None:
    with pytest.raises(ValueError, match=says(f"'{name}'", "<game>-v0", "Minesweeper")):
        run_episodes(textarena.AgentInstance(), "", {"env": name}, saying())


# gymnasium


def test_correct_play_wins_a_game_of_gymnasium_and_wrong_play_does_not(gymnasium: ModuleType) -> None:
    way = saying("down", "I go DOWN.", "right", "1, no: 2", "down", "right")
    steps = run_episodes(gymnasium.AgentInstance(), "Play.", json.dumps(LAKE), way)
    assert rewards(steps) == [0.0] * 5 + [1.0] and steps[-1]["scores"] == 1.0
    hole = run_episodes(gymnasium.AgentInstance(), "Play.", LAKE, saying("right", "down"))
    assert rewards(hole) == [0.0, 0.0] and hole[-1]["done"] and hole[-1]["scores"] == 0.0


def test_the_state_is_shown_and_a_text_without_an_action_does_not_change_it(gymnasium: ModuleType) -> None:
    environment = gymnasium.AgentInstance()
    begin = asyncio.run(environment.reset({"observation": "Play.", "label": LAKE}))["observation"]
    assert begin == [
        {
            "role": "user",
            "content": "Play.\nYou stand at [ ]. Reach G; H are holes.\nWrite one of: left, down, right, up.\n"
            "[S]FFF\nFHFH\nFFFH\nHFFG\n",
        }
    ]
    step = asyncio.run(environment.step({"action_text": "jump"}))
    assert text_of(step["environment_feedback"]).startswith("That names no action. Write one of: left")
    assert (step["rewards"], step["done"], step["extra_logs"]) == (0.0, False, {"invalid_actions": 1})


def test_the_state_of_taxi_marks_passenger_destination_and_taxi(gymnasium: ModuleType) -> None:
    environment = gymnasium.AgentInstance()
    asyncio.run(environment.reset({"observation": "", "label": {"env": "Taxi-v4", "seed": 3}}))
    # The taxi is in the upper middle. The passenger is at R and wants to go to Y.
    assert environment._shown(None) == (
        "+---------+\n|<R>: |[ ]: :G|\n| : | : : |\n| : : : : |\n| | : | : |\n|(Y)| : |B: |\n+---------+\n"
    )
    way = ["south", "south", "west", "west", "north", "north", "pickup", "south", "south", "south", "south", "dropoff"]
    steps = [asyncio.run(environment.step({"action_text": word})) for word in way]
    assert "[_]" in text_of(steps[7]["environment_feedback"])
    # The reward is 20 for the arrival and -1 for each of the eleven steps before.
    assert sum(rewards(steps)) == 20 - 11
    assert (steps[-1]["scores"], steps[-1]["done"]) == (1.0, True)


def test_the_state_of_blackjack_is_a_sentence(gymnasium: ModuleType) -> None:
    label = {"env": "Blackjack-v1", "seed": 3}
    steps = run_episodes(gymnasium.AgentInstance(), "", label, saying("hit", "stick"))
    assert text_of(steps[0]["environment_feedback"]) == "Your cards make 17; the dealer shows 10.\n"
    assert rewards(steps) == [0.0, -1.0] and steps[-1]["scores"] == 0.0


def test_a_game_ends_at_its_limit_of_steps(gymnasium: ModuleType) -> None:
    label = {**LAKE, "options": {"is_slippery": False, "max_episode_steps": 3}}
    steps = run_episodes(gymnasium.AgentInstance(), "", label, lambda _said: "left")
    assert [step["done"] for step in steps] == [False, False, True]
    assert steps[-1]["scores"] == 0.0


@pytest.mark.parametrize(
    ("label", "facts"),
    [
        ({"env": "Nonsense-v1"}, ["Nonsense", "FrozenLake-v1"]),
        ({"env": "FrozenLake-v1", "options": {"no": 1}}, ["'no'", "FrozenLake-v1"]),
        ({"env": "Pendulum-v1"}, ["Pendulum-v1", "Box", "FrozenLake-v1"]),
        ("FrozenLake-v1", ["'FrozenLake-v1'", "'env'", "data.label_key"]),
        ({"game": 1}, ["'game'", "'env'", "data.label_key"]),
    ],
)
def test_an_invalid_label_raises_an_error_with_the_setting_to_change(
    gymnasium: ModuleType, label: Any, facts: list[str]
) -> None:
    with pytest.raises(ValueError, match=says(*facts)):
        run_episodes(gymnasium.AgentInstance(), "", label, saying())


# both


@pytest.mark.parametrize(("name", "label"), [("textarena", NUMBER), ("gymnasium", LAKE)])
def test_an_untrained_policy_runs_episodes_without_errors(name: str, label: Any, tmp_path: Path) -> None:
    play_untrained(name, label, write_policy(tmp_path))
