"""Single-player games of textarena (extra `games`) that need no download.

A label is a JSON object (or its text): `{"env": "GuessTheNumber-v0", "seed": 3}`. The text of the prompt precedes the
rules, which the game writes. Set `agent.max_turns` to at least the limit of the game.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agents.environments import TextEnvironment, library_of_games, read_label

GAMES = (
    "2048 Bandit Blackjack Crosswords FifteenPuzzle FrozenLake GuessTheNumber LightsOut LogicPuzzle Mastermind "
    "Minesweeper PegJump RushHour Secretary Set Sokoban Sudoku ThreeCardMonte TowerOfHanoi"
)
"""Supported games: `<game>-v0` and an optional suffix. The other games have several players, load word lists, or print
wrong messages (as of 0.7.4)."""

_library = library_of_games("textarena")
_random = threading.Lock()


class AgentInstance(TextEnvironment):
    """Environment with the reward of the game: 1 for a win, less for a partial result. The score is clipped to 0..1."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - room for more
        """Return the prompt and the rules of the game."""
        label = read_label(states["label"], "env", '{"env": "GuessTheNumber-v0", "seed": 3}')
        name = f"{label['env']}-raw"
        if name.partition("-v0")[0] not in GAMES.split() or name not in _library.envs.registration.ENV_REGISTRY:
            raise ValueError(f"the label's env is {label['env']!r}; set it to <game>-v0, for one of {GAMES}")
        self._random = random.Random(int(label.get("seed", 0))).getstate()
        with self._own_random():
            self._game = _library.make(name)
            # Some games use the seed of reset instead of Python's generator.
            self._game.reset(num_players=1, seed=int(label.get("seed", 0)))
            text = self._new_text()
        return {"observation": self.as_feedback("\n\n".join(filter(None, [states["observation"], text])))}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Make a move. Brackets are added if it has none, because games expect moves such as [5]."""
        move = states["action_text"].strip()
        if "[" not in move:
            move = f"[{move}]"
        reward = 0.0
        is_invalid = False
        with self._own_random():
            done, _ = self._game.step(move)
            rewards, about = self._game.close() if done else (None, None)
            if about:
                text = about[0].get("reason") or ""
                is_invalid = bool(about[0]["invalid_move"])
            else:
                text = self._new_text()
        if rewards:
            reward = float(rewards[0])
        return {
            "rewards": reward,
            "scores": min(max(reward, 0.0), 1.0),
            "environment_feedback": self.as_feedback(f"{text}\n"),
            "done": done,
            "extra_logs": {"invalid_move": float(is_invalid)},
        }

    def _new_text(self) -> str:
        """Return the messages of the game since the last call, without the moves of the player."""
        _, messages = self._game.get_observation()
        return "\n".join(text for _, text, kind in messages if kind != _library.ObservationType.PLAYER_ACTION)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Use this episode's state of Python's global random generator inside the block, and restore the old state."""
        # Games use the global generator, whose numbers would otherwise depend on the order of the episodes.
        with _random:
            previous = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(previous)
