"""Games of gymnasium (extra `games`) with few actions and a textual state: its "toy text" environments.

A label is a JSON object (or its text): `{"env": "FrozenLake-v1", "seed": 3, "options": {"is_slippery": false}}`. The
`options` are passed to `gymnasium.make`. The text of the prompt precedes the rules.
"""

from __future__ import annotations

import re
from typing import Any

from agents.environments import TextEnvironment, library_of_games, read_label

RULES = {
    "FrozenLake": ("You stand at [ ]. Reach G; H are holes.", "left down right up"),
    "Taxi": (
        "You are the taxi [ ]. Pick up the passenger at < >, who is in the taxi at [_], and set him down at ( ).",
        "south north east west pickup dropoff",
    ),
    "Blackjack": ("Come closer to 21 than the dealer, and not above it.", "stick hit"),
}
"""Beginning of a game's name -> (rules, names of the actions), which the games do not print."""
EXAMPLE = '{"env": "FrozenLake-v1", "seed": 3}'

_library = library_of_games("gymnasium")


class AgentInstance(TextEnvironment):
    """Environment with the rewards of the game. The score is 1 if the reward of the final step is above 0, else 0."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - room for more
        """Return the prompt, the rules and the first state."""
        self._invalid = 0
        label = read_label(states["label"], "env", EXAMPLE)
        name = str(label["env"])
        try:
            # Created twice: only a game knows its render modes, and the mode must be set when the game is created.
            modes = _library.spec(name).make().metadata.get("render_modes", ())
            options = {**label.get("options", {})}
            if "ansi" in modes:
                options["render_mode"] = "ansi"
            self._game = _library.make(name, **options)
        except (_library.error.Error, TypeError) as error:
            raise ValueError(f"gymnasium cannot create the label's {label} ({error}); set e.g. {EXAMPLE}") from error
        space = self._game.action_space
        if not isinstance(space, _library.spaces.Discrete):
            raise ValueError(f"{name} has the actions {space}, which are not discrete; set env to e.g. FrozenLake-v1")
        rules, names = RULES.get(name.partition("-")[0].removesuffix("8x8"), ("", ""))
        start = int(space.start)
        self._actions = {str(i + start): i + start for i in range(int(space.n))}
        self._actions |= {action: i + start for i, action in enumerate(names.split())}
        self._choices = names.replace(" ", ", ") or ", ".join(self._actions)
        seen, _ = self._game.reset(seed=int(label.get("seed", 0)))
        parts = [states["observation"], rules, f"Write one of: {self._choices}.", self._shown(seen)]
        return {"observation": self.as_feedback("\n".join(filter(None, parts)))}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Take the last action named in the text. A text without one leaves the game unchanged and gets a message."""
        named = [word for word in re.findall(r"\w+", states["action_text"].lower()) if word in self._actions]
        reward = 0.0
        terminated = truncated = False
        if named:
            seen, reward, terminated, truncated, _ = self._game.step(self._actions[named[-1]])
            feedback = self._shown(seen)
        else:
            self._invalid += 1
            feedback = f"That names no action. Write one of: {self._choices}.\n"
        return {
            "rewards": float(reward),
            "scores": float(terminated and reward > 0),
            "environment_feedback": self.as_feedback(feedback),
            "done": bool(terminated or truncated),
            "extra_logs": {"invalid_actions": self._invalid},
        }

    def _shown(self, seen: Any) -> str:
        if self._game.render_mode != "ansi":
            if self._game.spec.id.startswith("Blackjack"):
                total, dealer, has_ace = seen
                if has_ace:
                    total = f"{total}, with an ace as 11"
                return f"Your cards make {total}; the dealer shows {dealer}.\n"
            return f"{seen}\n"
        text = self._game.render()
        replaced = 1
        while replaced:  # repeated, because colours may be nested
            text, replaced = re.subn(r"\x1b\[([\d;]+)m([^\x1b]*)\x1b\[0m", _in_brackets, text)
        return text.strip("\n") + "\n"


def _in_brackets(coloured: re.Match[str]) -> str:
    """Replace a colour by brackets. A background colour marks the player; other colours mark places of Taxi."""
    left, right = {"34;1": "<>", "35": "()"}.get(coloured[1], "[]")
    return f"{left}{coloured[2]}{right}"
