"""The environment `env:guess`: find a number in a few turns. `task:guess` has the games."""

from __future__ import annotations

import re
from typing import Any

from agents.environment import AgentInstanceBase
from plugins.demo.tasks import GuessTask

AGAIN = ":"
"""Feedback on a turn that is no number: as at the prompt's end, continue."""


class AgentInstance(AgentInstanceBase):
    """Reward and score are 1 for the turn that finds the number, and 0 for any other."""

    def __init__(self) -> None:
        self._task = GuessTask()

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - room for more
        """Begin with the prompt as it is."""
        self._turns = self._invalid = 0
        self._secret = self._task.secret_of(states["label"])
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Say on which side of the guess the number is."""
        self._turns += 1
        written = re.fullmatch(r"[0-9]{1,4}", states["action_text"])
        guess = int(written[0]) if written else None
        self._invalid += guess is None
        is_right = float(guess == self._secret)
        return {
            "rewards": is_right,
            "scores": is_right,
            "environment_feedback": AGAIN if guess is None else self._task.feedback(guess, self._secret),
            "done": bool(is_right) or self._turns >= self._task.turns,
            "extra_logs": {"guesses": self._turns, "invalid_guesses": self._invalid},
        }
