"""A multi-turn agent: the policy guesses the label, an integer, and reads whether it is higher or lower."""

from __future__ import annotations

import re
from typing import Any

GUESSES = 5


class AgentInstance:
    """Environment of one episode at a time."""

    def __init__(self) -> None:
        self.secret = self.guesses = 0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Take the number from the label."""
        if not re.fullmatch(r"\s*-?[0-9]+\s*", str(states["label"])):
            raise ValueError(f"the label {states['label']!r} is not an integer; set the label key to another field")
        self.secret = int(states["label"])
        self.guesses = 0
        return {"observation": f"{states['observation']}\nGuess the number.\n"}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Compare the last number in the action with the secret number. At most 12 digits of it are used."""
        self.guesses += 1
        numbers = re.findall(r"-?[0-9]{1,12}", states["action_text"])
        won = False
        feedback = "\nThat was no number. Guess again.\n"
        if numbers:
            guess = int(numbers[-1])
            won = guess == self.secret
            feedback = "\nHigher. Guess again.\n" if guess < self.secret else "\nLower. Guess again.\n"
        if won:
            feedback = "\nRight.\n"
        return {
            "rewards": float(won),
            "scores": float(won),
            "environment_feedback": feedback,
            "done": won or self.guesses >= GUESSES,
            "extra_logs": {"guesses": self.guesses},
        }
