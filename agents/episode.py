"""Data classes of episodes: token ids, the turns of the policy, and rewards. This module does not import torch."""

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
"""Stride of random streams, above the number of samples of any prompt. Sequence k of a sample uses the random numbers
of sample k * STREAMS + sample_id."""

Status = Literal["finished", "truncated", "aborted", "error"]
"""`finished`: the environment returned done=True or, without an environment, the policy wrote an end token.
`truncated`: a limit of tokens or turns was reached after at least one turn. `aborted`: the episode was ended from
outside. `error`: the environment raised, hung, died or broke its contract, or no tokens were left for a first turn."""


@dataclass(frozen=True)
class EpisodeTask:
    """Input of an episode."""

    tokens: list[int]
    """Token ids of the prompt."""
    prompt: str
    """Text of the prompt."""
    label: Any
    """Label of the row."""
    prompt_id: int
    sample_id: int
    """Index of this sample among the samples of the prompt."""
    sampling: SamplingConfig
    """Sampling parameters of the turns. `max_new_tokens` is the limit of one turn."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row."""
    data_source: str = ""
    """Name of the data source of the prompt, from the data."""


@dataclass
class Turn:
    """One turn of the policy: tokens[start:end] of its episode."""

    start: int
    end: int
    reward: float = 0.0
    finish: str = "stop"
    """Reason for the end of the turn: "stop" (an end token, or a stop text), "length" or "abort"."""


@dataclass
class Episode:
    """One sequence to train on."""

    tokens: list[int]
    """Token ids of the prompt, the turns, and the environment's text between them. Tokens are only appended."""
    prompt_length: int
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the policy's tokens in nats, 0 for other tokens. Same length as `tokens`."""
    versions: list[int] = field(default_factory=list)
    """Weight versions that generated the policy's tokens, -1 for other tokens. Same length as `tokens`."""
    turns: list[Turn] = field(default_factory=list)
    status: Status = "finished"
    reward: float = 0.0
    score: float = 0.0
    logs: dict[str, float] = field(default_factory=dict)
    error: str = ""
    """Error in one line, or an empty string."""
    trace: str = ""
    """Traceback, if the code of the environment raised."""
    is_rewarded: bool = True
    """False if a reward function will score the episode later."""
    branch: int = 0
    """0 for the main sequence of a sample, and a positive number for its further sequences."""

    def __post_init__(self) -> None:
        # The tokens of the prompt were not sampled by the policy.
        self.logprobs += [0.0] * (len(self.tokens) - len(self.logprobs))
        self.versions += [-1] * (len(self.tokens) - len(self.versions))

    def act(self, drawn: Generation, keep: int | None = None) -> Turn:
        """Append a generation of the policy, or its first `keep` tokens, as a turn, and return the turn."""
        start = len(self.tokens)
        self.tokens += drawn.tokens[:keep]
        self.logprobs += drawn.logprobs[:keep]
        self.versions += drawn.versions[:keep]
        self.turns.append(Turn(start, len(self.tokens), finish=drawn.finish))
        return self.turns[-1]

    def observe(self, tokens: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def cut(self, length: int) -> None:
        """Truncate an episode without turns to `length` tokens."""
        assert not self.turns, self.turns
        del self.tokens[length:], self.logprobs[length:], self.versions[length:]
        self.prompt_length = min(self.prompt_length, length)

    def fail(self, error: str, trace: str = "") -> None:
        """Set the status to "error", and all rewards and the score to 0."""
        self.status = "error"
        self.error = " ".join(error.split())
        self.trace = trace
        # A reward of earlier turns would be trained on although the outcome of the episode is unknown.
        self.reward = self.score = 0.0
        for turn in self.turns:
            turn.reward = 0.0


class Policy:
    """Interface of the policy for one episode."""

    def __init__(self, task: EpisodeTask, engine: AsyncEngine, encoder: TextEncoder, options: AgentOptions) -> None:
        self.encoder = encoder
        self.tokenizer = encoder.tokenizer
        self.max_turns = options.max_turns
        limits = [limit for limit in (options.max_tokens, engine.positions) if limit is not None]
        self.max_tokens = min(limits, default=None)
        """Maximum number of tokens of a sequence. None: no limit."""
        self.stop = options.stop
        """Stop texts of every turn."""
        self.broken: Exception | None = None
        """Exception of the engine. It ends the run, because neither the episode nor its executor has caused it."""
        self._task = task
        self._engine = engine

    def has_space(self, count: int) -> bool:
        """True if a sequence of `count` tokens can be continued."""
        return self.max_tokens is None or count < self.max_tokens

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        return decode(self.tokenizer, tokens, skip_special_tokens)

    async def draw(
        self, tokens: Sequence[int], sampling: SamplingConfig, stop: Sequence[str] = (), stream: int = 0
    ) -> tuple[Generation, int]:
        """Generate a continuation of `tokens`.

        Args:
            tokens: all tokens of the sequence so far.
            sampling: sampling parameters. `max_new_tokens` is limited to the remaining tokens of `max_tokens`.
            stop: stop texts of this turn, in addition to those of every turn.
            stream: number of the random stream. Sequences of one episode that are generated concurrently need different
                numbers, so that their random numbers differ.

        Returns:
            The generation, and the number of its tokens that belong to the turn: those up to the token that completes a
            stop text.

        Raises:
            ValueError: `tokens` is empty or has reached the limit.
        """
        if not tokens or not self.has_space(len(tokens)):
            reason = f"the limit is {self.max_tokens} (the smaller of the model's positions and agent.max_tokens)"
            raise ValueError(f"a sequence of {len(tokens)} tokens cannot be continued: {reason}")
        if self.max_tokens is not None and len(tokens) + sampling.max_new_tokens > self.max_tokens:
            sampling = replace(sampling, max_new_tokens=self.max_tokens - len(tokens))
        # Random numbers depend on the id of the sample, so each stream uses ids of its own.
        sample_id = stream * STREAMS + self._task.sample_id
        request: Request | None = None
        try:
            request = self._engine.submit(tokens, sampling, prompt_id=self._task.prompt_id, sample_id=sample_id)
            return await self._generate_until(request, [*self.stop, *stop])
        except asyncio.CancelledError:
            # Without the abort the engine would finish a response that nobody reads.
            if request is not None:
                await request.abort()
            raise
        except Exception as error:
            # Recorded, because the user's executor may catch the error and continue.
            self.broken = error
            raise

    async def _generate_until(self, request: Request, stop: Sequence[str]) -> tuple[Generation, int]:
        """Return the generation and its number of tokens up to the end, or up to a stop text."""
        if stop:
            # A token has at least one byte, so a stop text of n bytes spans at most n tokens.
            reach = max(len(text.encode()) for text in stop)
            seen: list[int] = []
            async for piece in request:
                seen += piece.tokens
                # The last tokens are checked first: decoding all tokens every time would take longer than generating.
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
    """Base class of executors. One instance runs many episodes concurrently in one asyncio loop."""

    def open(self, options: AgentOptions) -> None:  # noqa: B027 - optional for subclasses
        """Prepare for episodes. Called once before the first episode."""

    async def close(self) -> None:  # noqa: B027 - optional for subclasses
        """Release resources. Called once after the last episode, in the loop of the episodes."""

    @abstractmethod
    async def execute(self, task: EpisodeTask, policy: Policy) -> Episode | list[Episode]:
        """Run one episode. Return a list if it has several sequences, with the main one first.

        An exception ends this episode with the status "error".
        """
