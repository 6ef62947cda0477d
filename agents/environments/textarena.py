"""One-runner games of textarena (extra `games`) that need no download.

A label is a JSON object (or its text): `{"env": "GuessTheNumber-v0", "seed": 3}`. The prompt's text comes before the
rules, which the game writes itself. `agent.max_turns` is to be at least the game's own limit.
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
"""By the beginning of their names, `<game>-v0` and what may follow. Others have several runners, load word lists, or
mix up what they say (as of 0.7.4)."""

_library = library_of_games("textarena")
_random = threading.Lock()


class AgentInstance(TextEnvironment):
    """The reward is the game's: 1 when it is won, a share for a part of it. The score is that from 0 to 1."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - room for more
        """Begin with the prompt and the game's rules."""
        label = read_label(states["label"], "env", '{"env": "GuessTheNumber-v0", "seed": 3}')
        name = f"{label['env']}-raw"
        if name.partition("-v0")[0] not in GAMES.split() or name not in _library.envs.registration.ENV_REGISTRY:
            raise ValueError(f"the label's env is {label['env']!r}; set it to <game>-v0, for one of {GAMES}")
        self._random = random.Random(int(label.get("seed", 0))).getstate()
        with self._own_random():
            self._game = _library.make(name)
            # The game seeds once more, for those that want it so.
            self._game.reset(num_players=1, seed=int(label.get("seed", 0)))
            text = self._new_text()
        return {"observation": self.says("\n\n".join(filter(None, [states["observation"], text])))}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Make a move; one without brackets gets them, as games read moves such as [5]."""
        move = states["action_text"].strip()
        with self._own_random():
            done, _ = self._game.step(move if "[" in move else f"[{move}]")
            rewards, about = self._game.close() if done else (None, None)
            text = about[0].get("reason") or "" if about else self._new_text()
        reward = float(rewards[0]) if rewards else 0.0
        return {
            "rewards": reward,
            "scores": min(max(reward, 0.0), 1.0),
            "environment_feedback": self.says(f"{text}\n"),
            "done": done,
            "extra_logs": {"invalid_move": float(bool(about and about[0]["invalid_move"]))},
        }

    def _new_text(self) -> str:
        """What the game has said since it was last asked, without repeating the runner."""
        _, messages = self._game.get_observation()
        return "\n".join(text for _, text, kind in messages if kind != _library.ObservationType.PLAYER_ACTION)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Games draw from Python's common generator: each episode has a state of its own there, and leaves no trace."""
        with _random:
            common = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(common)
