"""The environment `env:guess`: guess a number in a few turns. The data source `task:guess` generates the games."""

from __future__ import annotations

import re
from typing import Any

from agents.environment import AgentInstanceBase
from plugins.demo.tasks import GuessTask

AGAIN = ":"
"""Feedback after a turn that is not a number: the last character of the prompt, so the policy guesses again."""


class AgentInstance(AgentInstanceBase):
    """One game. Reward and score are 1 for the turn that guesses the number, and 0 for every other turn."""

    def __init__(self) -> None:
        self._task = GuessTask()

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - room for more
        """Start a game: the observation is the prompt, the label is the secret number."""
        self._turns = self._invalid = 0
        self._secret = self._task.secret_of(states["label"])
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Answer a guess with `>` (the number is larger) or `<` (the number is smaller)."""
        self._turns += 1
        match = re.fullmatch(r"[0-9]{1,4}", states["action_text"])
        guess = None
        feedback = AGAIN
        if match:
            guess = int(match[0])
            feedback = self._task.feedback(guess, self._secret)
        self._invalid += guess is None
        is_right = float(guess == self._secret)
        return {
            "rewards": is_right,
            "scores": is_right,
            "environment_feedback": feedback,
            "done": bool(is_right) or self._turns >= self._task.turns,
            "extra_logs": {"guesses": self._turns, "invalid_guesses": self._invalid},
        }
