"""Games of gymnasium (extra `games`) with a handful of actions and a state that can be written: its toy text ones.

A label is a JSON object (or its text): `{"env": "FrozenLake-v1", "seed": 3, "options": {"is_slippery": false}}`, where
`options` go to `gymnasium.make`. The prompt's text comes before the rules.
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
"""What games do not say themselves, and the names of their actions, by the beginning of their names."""
EXAMPLE = '{"env": "FrozenLake-v1", "seed": 3}'

_library = library_of_games("gymnasium")


class AgentInstance(TextEnvironment):
    """The rewards are the game's. The score is 1 when the last one, which ended it, was above 0: it was won."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - room for more
        """Begin with the prompt, the rules and the first state."""
        self._invalid = 0
        label = read_label(states["label"], "env", EXAMPLE)
        name = str(label["env"])
        try:
            modes = _library.spec(name).make().metadata.get("render_modes", ())
            options = {**label.get("options", {}), **({"render_mode": "ansi"} if "ansi" in modes else {})}
            self._game = _library.make(name, **options)
        except (_library.error.Error, TypeError) as error:
            raise ValueError(f"gymnasium cannot make the label's {label} ({error}); set e.g. {EXAMPLE}") from error
        space = self._game.action_space
        if not isinstance(space, _library.spaces.Discrete):
            raise ValueError(f"{name} has the actions {space}, which cannot be named; set env to e.g. FrozenLake-v1")
        rules, names = RULES.get(name.partition("-")[0].removesuffix("8x8"), ("", ""))
        start = int(space.start)
        self._actions = {str(i + start): i + start for i in range(int(space.n))}
        self._actions |= {action: i + start for i, action in enumerate(names.split())}
        self._choices = names.replace(" ", ", ") or ", ".join(self._actions)
        seen, _ = self._game.reset(seed=int(label.get("seed", 0)))
        parts = [states["observation"], rules, f"Write one of: {self._choices}.", self._shown(seen)]
        return {"observation": self.says("\n".join(filter(None, parts)))}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: ARG002 - as above
        """Take the last action that the text names; one that names none changes nothing, and the policy reads so."""
        named = [word for word in re.findall(r"\w+", states["action_text"].lower()) if word in self._actions]
        reward, ended, cut = 0.0, False, False
        if named:
            seen, reward, ended, cut, _ = self._game.step(self._actions[named[-1]])
            feedback = self._shown(seen)
        else:
            self._invalid += 1
            feedback = f"That names no action. Write one of: {self._choices}.\n"
        return {
            "rewards": float(reward),
            "scores": float(ended and reward > 0),
            "environment_feedback": self.says(feedback),
            "done": bool(ended or cut),
            "extra_logs": {"invalid_actions": self._invalid},
        }

    def _shown(self, seen: Any) -> str:
        if self._game.render_mode != "ansi":
            if self._game.spec.id.startswith("Blackjack"):
                total, dealer, ace = seen
                return f"Your cards make {total}{', with an ace as 11' if ace else ''}; the dealer shows {dealer}.\n"
            return f"{seen}\n"
        text, marked = self._game.render(), 1
        while marked:  # a colour may stand within another
            text, marked = re.subn(r"\x1b\[([\d;]+)m([^\x1b]*)\x1b\[0m", _marked, text)
        return text.strip("\n") + "\n"


def _marked(coloured: re.Match[str]) -> str:
    """Write brackets for a colour: a background is the runner's, the others are the taxi's."""
    left, right = {"34;1": "<>", "35": "()"}.get(coloured[1], "[]")
    return f"{left}{coloured[2]}{right}"
