"""What an episode is, while it is run and afterwards: token ids, and who wrote which. Nothing here needs torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agents.options import AgentOptions
    from components.data.text import TextEncoder
    from components.engines.async_engine import Generation
    from components.engines.config import SamplingConfig

Status = Literal["finished", "truncated", "aborted", "error"]
"""`finished`: its environment was done with it, or, where there is none, an end token came. `truncated`: a limit of
tokens or turns came first. `aborted`: it was ended from outside. `error`: its environment raised, hung, died or broke
its contract."""


@dataclass(frozen=True)
class EpisodeTask:
    """What an episode starts from."""

    tokens: list[int]
    """Of the prompt."""
    prompt: str
    """Its text."""
    label: Any
    """Of the data."""
    prompt_id: int
    sample_id: int
    """Which of the prompt's samples."""
    sampling: SamplingConfig
    """How its turns are drawn; `max_new_tokens` is the limit of one turn."""
    datasource: str = ""


@dataclass
class Turn:
    """What the policy wrote in one go: tokens[start:end] of its episode."""

    start: int
    end: int
    reward: float = 0.0
    finish: str = "stop"
    """Why it ended: "stop" (an end token, or a stop text), "length" or "abort"."""


@dataclass
class Episode:
    """One sequence to train on."""

    tokens: list[int]
    """Prompt, turns and what the environment said between them. Only ever appended to."""
    prompt_length: int
    logprobs: list[float] = field(default_factory=list)
    """As long as `tokens`: in nats, of what the policy wrote; 0 elsewhere."""
    versions: list[int] = field(default_factory=list)
    """As long as `tokens`: of the weights that drew what the policy wrote; -1 elsewhere."""
    turns: list[Turn] = field(default_factory=list)
    status: Status = "finished"
    reward: float = 0.0
    score: float = 0.0
    logs: dict[str, float] = field(default_factory=dict)
    error: str = ""
    """What went wrong, in one line."""
    trace: str = ""
    """Where, if the code of its environment raised."""
    is_rewarded: bool = True
    """False: a reward is still to score it."""
    branch: int = 0
    """0: the main one of its sample; others are further sequences of the same sample."""

    def __post_init__(self) -> None:
        self.logprobs += [0.0] * (len(self.tokens) - len(self.logprobs))
        self.versions += [-1] * (len(self.tokens) - len(self.versions))

    def act(self, drawn: Generation, keep: int | None = None) -> Turn:
        """Append what the policy wrote, or the first `keep` tokens of it, as a turn."""
        count = len(drawn.tokens) if keep is None else keep
        self.tokens += drawn.tokens[:count]
        self.logprobs += drawn.logprobs[:count]
        self.versions += drawn.versions[:count]
        self.turns.append(Turn(len(self.tokens) - count, len(self.tokens), finish=drawn.finish))
        return self.turns[-1]

    def observe(self, tokens: Sequence[int]) -> None:
        """Append what the environment said."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def cut(self, length: int) -> None:
        """Keep no more than `length` tokens, of an episode in which the policy wrote nothing."""
        assert not self.turns, self.turns
        del self.tokens[length:], self.logprobs[length:], self.versions[length:]
        self.prompt_length = min(self.prompt_length, length)

    def fail(self, error: str, trace: str = "") -> None:
        """End it as an error, which earns nothing."""
        self.status, self.error, self.trace = "error", " ".join(error.split()), trace
        self.reward = self.score = 0.0
        for turn in self.turns:
            turn.reward = 0.0


class Policy(ABC):
    """What an executor asks for tokens; made for one episode."""

    tokenizer: PreTrainedTokenizerBase
    encoder: TextEncoder
    """Of the same tokenizer."""
    max_tokens: int | None
    """Tokens of a sequence, at most; None: any number."""
    max_turns: int
    stop: Sequence[str] = ()
    """Texts that end every turn."""

    def has_space(self, count: int) -> bool:
        """Whether a sequence of `count` tokens can be continued."""
        return self.max_tokens is None or count < self.max_tokens

    @abstractmethod
    async def draw(
        self, tokens: Sequence[int], sampling: SamplingConfig, stop: Sequence[str] = (), stream: int = 0
    ) -> tuple[Generation, int]:
        """Continue `tokens`.

        Args:
            tokens: all of the sequence so far.
            sampling: how to draw; `max_new_tokens` is lowered to what is left of `max_tokens`.
            stop: texts that end the turn, besides those that end every one.
            stream: sequences of one episode that are drawn side by side each name a number of their own, so that their
                random numbers differ.

        Returns:
            What was drawn, and how many of its tokens the turn consists of: those up to the one with which a stop text
            was complete.

        Raises:
            ValueError: there is nothing to continue, or no room for a single token.
        """


class AgentExecutorBase(ABC):
    """Plays episodes. One instance runs many at the same time, all in one asyncio loop."""

    def open(self, options: AgentOptions) -> None:  # noqa: B027 - most need nothing
        """Prepare for episodes; called once, before the first."""

    async def close(self) -> None:  # noqa: B027 - as above
        """End what was started; called once, in the loop of the episodes, after the last."""

    @abstractmethod
    async def execute(self, task: EpisodeTask, policy: Policy) -> Episode | list[Episode]:
        """Play one episode; several sequences where it branched, the main one first.

        What it raises ends this episode as an error.
        """
