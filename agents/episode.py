"""What an episode is, while it is run and afterwards: token ids, and who wrote which. Nothing here needs torch."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from agents.options import AgentOptions
from agents.rendering import decode

if TYPE_CHECKING:
    from components.data.text import TextEncoder
    from components.generate.async_engine import AsyncEngine, Generation, Request
    from components.generate.config import SamplingConfig

STREAMS = 2**32
"""More samples than any prompt has: sequence k of a sample draws the numbers of sample k * STREAMS + sample_id."""

Status = Literal["finished", "truncated", "aborted", "error"]
"""`finished`: its environment was done with it, or, where there is none, an end token came. `truncated`: a limit of
tokens or turns came first, after a turn. `aborted`: it was ended from outside. `error`: its environment raised, hung,
died or broke its contract, or there were no tokens left for a first turn."""


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
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The data's other columns."""
    data_source: str = ""
    """Source of the prompt, as the data name it."""


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
    """Prompt, turns and the environment's text between them. Only ever appended to."""
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
        """Append the environment's text."""
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


class Policy:
    """The policy, as one episode asks it."""

    def __init__(self, task: EpisodeTask, engine: AsyncEngine, encoder: TextEncoder, options: AgentOptions) -> None:
        self.encoder = encoder
        self.tokenizer = encoder.tokenizer
        self.max_turns = options.max_turns
        limits = [limit for limit in (options.max_tokens, engine.positions) if limit is not None]
        self.max_tokens = min(limits, default=None)
        """Tokens of a sequence, at most; None: any number."""
        self.stop = options.stop
        """Texts that end every turn."""
        self.broken: Exception | None = None
        """What the engine raised: not the episode's fault, and not for its executor to deal with."""
        self._task = task
        self._engine = engine

    def has_space(self, count: int) -> bool:
        """Whether a sequence of `count` tokens can be continued."""
        return self.max_tokens is None or count < self.max_tokens

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        return decode(self.tokenizer, tokens, skip_special_tokens)

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
            ValueError: there is nothing to continue, or no token left.
        """
        if not tokens or not self.has_space(len(tokens)):
            why = f"it may have {self.max_tokens} (the model's positions, or agent.max_tokens where that is less)"
            raise ValueError(f"a sequence of {len(tokens)} tokens cannot be continued: {why}")
        if self.max_tokens is not None and len(tokens) + sampling.max_new_tokens > self.max_tokens:
            sampling = replace(sampling, max_new_tokens=self.max_tokens - len(tokens))
        sample_id = stream * STREAMS + self._task.sample_id
        request: Request | None = None
        try:
            request = self._engine.submit(tokens, sampling, prompt_id=self._task.prompt_id, sample_id=sample_id)
            return await self._until(request, [*self.stop, *stop])
        except asyncio.CancelledError:
            if request is not None:
                await request.abort()
            raise
        except Exception as error:
            self.broken = error
            raise

    async def _until(self, request: Request, stop: Sequence[str]) -> tuple[Generation, int]:
        """What is drawn, up to the end or to one of the texts."""
        if stop:
            # So many tokens hold a text, as none is less than a byte.
            reach, seen = max(len(text.encode()) for text in stop), []
            async for piece in request:
                seen += piece.tokens
                # Few tokens first: to read all of them again with each would take longer than drawing them.
                if self._holds(seen[-len(piece.tokens) - reach :], stop) and self._holds(seen, stop):
                    drawn = await request.abort()
                    counts = range(len(seen))
                    complete = bisect_left(counts, True, key=lambda count: self._holds(seen[:count], stop))
                    return replace(drawn, finish="stop"), complete
        drawn = await request.result()
        return drawn, len(drawn.tokens)

    def _holds(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        written = self.decode(tokens)
        return any(text in written for text in stop)


class AgentExecutorBase(ABC):
    """Runs episodes. One instance runs many at the same time, all in one asyncio loop."""

    def open(self, options: AgentOptions) -> None:  # noqa: B027 - most need nothing
        """Prepare for episodes; called once, before the first."""

    async def close(self) -> None:  # noqa: B027 - as above
        """End what was started; called once, in the loop of the episodes, after the last."""

    @abstractmethod
    async def execute(self, task: EpisodeTask, policy: Policy) -> Episode | list[Episode]:
        """Run one episode; several sequences where it branched, the main one first.

        What it raises ends this episode as an error.
        """
