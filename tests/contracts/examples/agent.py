"""An agent of many turns: the policy guesses the label, a whole number, and is told higher or lower."""

from __future__ import annotations

import re
from typing import Any

GUESSES = 5


class AgentInstance:
    """One episode at a time."""

    def __init__(self) -> None:
        self.secret = self.guesses = 0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Take the number from the label."""
        if not re.fullmatch(r"\s*-?[0-9]+\s*", str(states["label"])):
            raise ValueError(f"the label {states['label']!r} is no whole number; set the label key to another field")
        self.secret, self.guesses = int(states["label"]), 0
        return {"observation": f"{states['observation']}\nGuess the number.\n"}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Compare the last number in the action with the secret one; digits beyond the twelfth do not matter."""
        self.guesses += 1
        found = re.findall(r"-?[0-9]{1,12}", states["action_text"])
        guess = int(found[-1]) if found else None
        won = guess == self.secret
        hint = "That was no number." if guess is None else "Higher." if guess < self.secret else "Lower."
        return {
            "rewards": float(won),
            "scores": float(won),
            "environment_feedback": "\nRight.\n" if won else f"\n{hint} Guess again.\n",
            "done": won or self.guesses >= GUESSES,
            "extra_logs": {"guesses": self.guesses},
        }
