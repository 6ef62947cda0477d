"""Base class of environments.

In a file written for OpenRLHF's `--agent_func_path` only the import line must be changed:
`from agents import AgentInstanceBase, MultiTurnAgentExecutor`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class AgentInstanceBase(ABC):
    """Environment of one episode. Each episode constructs its own instance, without arguments."""

    @abstractmethod
    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Start the episode.

        Args:
            states: `observation` (text of the prompt), `label` (column of the data) and `extra_info` (the other columns
                of the data). The dict is a copy for this episode.
            kwargs: reserved for arguments of later versions.

        Returns:
            `{"observation": text or chat messages}`: the first input of the policy. If it equals the text of the
            prompt, the tokens of the prompt are used. A list of messages may come with `tools`, JSON schemas of
            functions. A chat template that supports tools renders them in its own format, and the system message at
            the beginning is omitted.
        """

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Respond to one action of the policy.

        Args:
            states: `observation_text` (all text before this action), `action_text` (text of the action without special
                tokens), `finish` ("stop", or "length" if a limit truncated the action), `label`, and `sampling_params`
                (`temperature`, `top_p`, `top_k`, `max_tokens` and `stop` of this action, in a dict of this episode).
            kwargs: reserved for arguments of later versions.

        Returns:
            A dict with these keys:

            - `rewards`: reward of this turn, a number. The reward of an episode is the sum over its turns.
            - `scores`: score of the episode so far, a number from 0 to 1. The last one counts. Default (or None): the
                sum of the rewards.
            - `environment_feedback`: next input of the policy, text or chat messages.
            - `done`: True if the episode has ended.
            - `sampling_params` (optional): sampling parameters of the next turn, a dict as above or an object with such
                attributes. Log-probabilities are trained at the run's temperature, top_p and top_k, so a change of
                these logs a warning.
            - `extra_logs` (optional): metrics, name -> number. Those of the last turn are logged.
        """
