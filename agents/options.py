"""The options of episodes, which recipes embed as their group `agent`. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from components.ranges import Count, Seconds, Share, out_of_range

_OF_ANY = ("func_path", "concurrency", "max_tokens")
"""Options that have an effect without an agent too, or say whether there is one."""


@dataclass(kw_only=True)
class AgentOptions:
    """Episodes in which the policy acts in an environment."""

    func_path: str | None = None
    """A Python file that defines `AgentExecutor` or `AgentInstance`, or the name of a shipped environment, as
    `env:guess`. Default: a response is one turn, and a reward scores it."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `AgentExecutor` or `AgentInstance` in that file."""
    rewarded_by: Literal["environment", "reward"] = "environment"
    """What rewards an episode: `environment`, the sum of the rewards of its steps; `reward`, the run's reward, which
    reads the text after the prompt in place of a response. The environment's rewards are not used then."""
    max_turns: Count = 16
    """Turns of an episode, at most; one that is not done by then is truncated."""
    max_tokens: Count | None = None
    """Tokens of an episode, at most: prompt, responses and feedback; without an agent prompt and response. Default: as
    many as the model has positions. The limit of one turn is that of a response."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a turn; they stay part of it."""
    concurrency: Count = 256
    """Episodes that one engine runs at the same time."""
    runs_in: Literal["loop", "thread", "process"] = "loop"
    """Where `reset` and `step` run: in the engine's event loop, for those that await what they wait for; in threads,
    for those that block; or each episode in a process of its own, for those that may hang, crash or use a core."""
    step_timeout_s: Seconds = 60.0
    """Seconds that one `reset` or `step` may take before its episode ends as an error."""
    max_failed_share: Share = 0.1
    """Share of a batch's episodes that may end as errors (or two, if that is more and not all); above it the run
    stops."""

    def __post_init__(self) -> None:
        for fault in out_of_range(self, "agent."):
            raise ValueError(fault)
        if not all(self.stop):
            raise ValueError("agent.stop holds an empty text; leave it out")
        if self.func_path and self.func_path.endswith(".py"):
            self.func_path = str(Path(self.func_path).expanduser().absolute())

    @property
    def gives_rewards(self) -> bool:
        """Whether the environment of an agent rewards the run's episodes."""
        return self.func_path is not None and self.rewarded_by == "environment"

    def notes(self, given: Collection[str], engine: str = "") -> list[str]:
        """What a user who has named the options `given` should know of before the run starts; `engine` generates."""
        idle = [f"agent.{option.name}" for option in fields(self) if option.name not in _OF_ANY]
        named = [name for name in idle if name in given]
        if self.func_path is None:
            return [f"no effect of {', '.join(named)}: there is no agent.func_path"] if named else []
        if engine == "vllm" and self.max_tokens is None:
            return ["vllm keeps memory for episodes as long as the model has positions; agent.max_tokens lowers that"]
        return []

    def longest_prompt(self, max_prompt_tokens: int, max_new_tokens: int) -> int | None:
        """Tokens that an engine may have to read before it writes; None: as many as the model has positions."""
        if self.max_tokens is not None:
            return max(self.max_tokens - max_new_tokens, 1)
        return max_prompt_tokens if self.func_path is None else None
