"""Options of episodes, the group `agent` of recipes. This module does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from components.ranges import Count, Seconds, Share, out_of_range

_OF_ANY = ("func_path", "concurrency", "max_tokens")
"""Options that have an effect also without an agent, or that set the agent."""


@dataclass(kw_only=True)
class AgentOptions:
    """Episodes in which the policy acts in an environment."""

    func_path: str | None = None
    """Path to a Python file that defines `AgentExecutor` or `AgentInstance`, or a shipped environment such as
    `env:guess`. Default: a response is a single turn, scored by the reward."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `AgentExecutor` or `AgentInstance` in that file."""
    rewarded_by: Literal["environment", "reward"] = "environment"
    """Source of an episode's reward. `environment`: the sum of the rewards of its steps. `reward`: the run's reward,
    which scores the text after the prompt; the environment's rewards are ignored."""
    max_turns: Count = 16
    """Maximum number of turns of an episode. An episode that is not done by then is truncated."""
    max_tokens: Count | None = None
    """Maximum number of tokens of an episode: prompt, responses and feedback (without an agent: prompt and response).
    Default: the number of the model's positions. The limit of a turn is the limit of a response."""
    stop: list[str] = field(default_factory=list)
    """Stop texts that end a turn. They are kept in the turn."""
    concurrency: Count = 256
    """Maximum number of episodes that one engine runs concurrently."""
    runs_in: Literal["loop", "thread", "process"] = "loop"
    """Place where `reset` and `step` run. `loop`: in the engine's event loop, for async code. `thread`: in threads, for
    blocking code. `process`: each episode in its own process, for code that may hang, crash or is CPU-bound."""
    step_timeout_s: Seconds = 60.0
    """Timeout of one `reset` or `step` in seconds. An episode that exceeds it ends as an error."""
    max_failed_share: Share = 0.1
    """Maximum share of a batch's episodes that may end as errors. Above it the run stops. Two failed episodes are
    always allowed, unless all fail."""

    def __post_init__(self) -> None:
        for fault in out_of_range(self, "agent."):
            raise ValueError(fault)
        if not all(self.stop):
            raise ValueError("agent.stop has an empty text; remove it")
        if self.func_path and self.func_path.endswith(".py"):
            self.func_path = str(Path(self.func_path).expanduser().absolute())

    @property
    def gives_rewards(self) -> bool:
        """True if the environment of an agent rewards the run's episodes."""
        return self.func_path is not None and self.rewarded_by == "environment"

    def notes(self, set_options: Collection[str], engine: str = "") -> list[str]:
        """Return notes for the user before the run starts.

        Args:
            set_options: names of the options that the user has set.
            engine: name of the rollout engine.
        """
        idle = [f"agent.{option.name}" for option in fields(self) if option.name not in _OF_ANY]
        without_effect = [name for name in idle if name in set_options]
        if self.func_path is None and without_effect:
            return [f"no effect of {', '.join(without_effect)}: agent.func_path is not set"]
        if self.func_path is not None and engine == "vllm" and self.max_tokens is None:
            return ["vllm reserves memory for episodes of the model's maximum length; agent.max_tokens lowers it"]
        return []

    def longest_prompt(self, max_prompt_tokens: int, max_new_tokens: int) -> int | None:
        """Return the maximum number of tokens that an engine reads before it generates. None: the model's positions."""
        if self.max_tokens is not None:
            return max(self.max_tokens - max_new_tokens, 1)
        return max_prompt_tokens if self.func_path is None else None
