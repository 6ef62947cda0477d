"""What an environment is made of. A file written for OpenRLHF's `--agent_func_path` needs no other change than that of
its import line: `from agents import AgentInstanceBase, MultiTurnAgentExecutor`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class AgentInstanceBase(ABC):
    """The environment of one episode: made without arguments for each of them, and asked by one episode alone."""

    @abstractmethod
    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Begin the episode.

        Args:
            states: `observation` (the prompt's text), `label` (of the data), `extra_info` (the data's other columns); a
                copy of the episode's own.
            kwargs: for what later versions may add.

        Returns:
            `{"observation": text or chat messages}`: what the policy reads first. The prompt's own text means the
            prompt's own tokens. Beside messages maybe `tools`, JSON schemas of functions: a chat template with a place
            for them writes them in its own way, instead of a system message at the beginning.
        """

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Respond to one action of the policy.

        Args:
            states: `observation_text` (all the policy has read and written before this action), `action_text` (what it
                has written now, without special tokens), `finish` ("stop", or "length" where a limit cut it off),
                `label`, `sampling_params` (how it was drawn: `temperature`, `top_p`, `top_k`, `max_tokens`, `stop`; a
                dict of this episode alone).
            kwargs: as above.

        Returns:
            A dict with `rewards` (one number: of this turn; an episode earns their sum), `scores` (one number: how good
            the episode is so far, from 0 to 1; the last counts. None or nothing: the sum of the rewards),
            `environment_feedback` (text, or chat messages: what the policy reads next), `done`, and, if you like,
            `sampling_params` (a dict like the one above, or an object with such attributes, for the next turn;
            log-probabilities are trained at the run's temperature, top_p and top_k, so a change of these is warned of)
            and `extra_logs` (names and numbers; those of the last turn are logged).
        """
