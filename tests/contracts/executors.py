"""Episodes of an executor that runs them itself (such as a client of OpenAI's API) with a policy of fixed texts."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from agents import episode as episodes
from agents.episode import EpisodeTask, Policy
from agents.options import AgentOptions
from agents.schema import StepResult
from components.data.text import TextEncoder
from components.generate.async_engine import Generation
from plugins.demo.tiny_model import learnt_tokenizer
from tests.contracts.episodes import SAMPLING, Episode, EpisodeRunner, Fault
from tests.contracts.samples import Sample

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_LIMIT_S = 1e6
"""Timeout of an episode in seconds. The trial that waits for this process has its own deadline."""


class FixedPolicy(Policy):
    """A policy that writes the actions of a sample, one per response."""

    def __init__(
        self,
        sample: Sample,
        task: EpisodeTask,
        encoder: TextEncoder,
        max_turns: int,
        begun: Callable[[], Awaitable[None]],
    ) -> None:
        engine: Any = SimpleNamespace(positions=None)  # the only attribute that is read
        super().__init__(task, engine, encoder, AgentOptions(max_turns=max_turns))
        self._sample = sample
        self._begun = begun
        self._drawn = 0

    async def draw(
        self, tokens: Sequence[int], sampling: Any, stop: Sequence[str] = (), stream: int = 0
    ) -> tuple[Generation, int]:
        """Return the next action with an end token."""
        number = self._drawn
        self._drawn += 1
        if number == 0:
            await self._begun()
        action = self._sample.actions[number % len(self._sample.actions)]
        ids = [*self.tokenizer.encode(action, add_special_tokens=False), self.tokenizer.eos_token_id]
        return Generation(ids, [0.0] * len(ids), [0] * len(ids), "stop"), len(ids)


class ExecutorRunner(EpisodeRunner):
    """Runs all episodes with one executor in one event loop."""

    def __init__(self, agent: Any, max_turns: int, emit: Callable[[str, str], None]) -> None:
        super().__init__(agent, max_turns, emit)
        tokenizer = learnt_tokenizer(["an episode"], 300)
        tokenizer.chat_template = TEMPLATE
        self._encoder = TextEncoder(tokenizer)
        self._executor: Any = None

    async def run(self, method: str, samples: Sequence[Sample]) -> list[Episode]:
        """Run episodes of the samples, and close the executor."""
        try:
            return await super().run(method, samples)
        finally:
            if self._executor is not None:
                await self._executor.close()

    def _make(self) -> Any:
        if self._executor is None:
            self._executor = self._agent
            if inspect.isclass(self._agent):
                self._executor = self._agent()
            self._executor.open(AgentOptions(max_turns=self._max_turns, step_timeout_s=NO_LIMIT_S))
        return self._executor

    async def _begin_waiting(
        self,
        agent: Any,
        sample: Sample,
        name: str,
        after_reset: Callable[[], Awaitable[None]] | None = None,
        max_turns: int | None = None,
    ) -> Episode:
        async def begun() -> None:
            if after_reset is not None:
                await after_reset()

        label = copy.deepcopy(sample.label)
        columns = copy.deepcopy(dict(sample.columns))
        tokens = self._encoder.encode_prompt(sample.prompt)
        task = EpisodeTask(tokens, sample.prompt, label, 0, 0, SAMPLING, columns)
        policy = FixedPolicy(sample, task, self._encoder, max_turns or self._max_turns, begun)
        self._emit("begin", f"execute of {name}")
        played: Any = await agent.execute(task, policy)
        self._emit("end", f"execute of {name}")
        if not isinstance(played, list):
            played = [played]
        if played[0].status == "error":
            if "ValueError" in played[0].error:
                raise ValueError(played[0].error)
            raise Fault(f"{played[0].error}\n{played[0].trace}".rstrip())
        if label != sample.label or columns != dict(sample.columns):
            self.played.changed.append(f"{name} changed the label or the columns of its task")
        return self._as_played(played)

    def _as_played(self, played: Sequence[episodes.Episode]) -> Episode:
        main = played[0]
        decode = self._encoder.tokenizer.decode
        turns: list[StepResult] = []
        for turn in main.turns:
            text = str(decode(main.tokens[turn.start : turn.end]))
            if turn is main.turns[-1]:
                turns.append(StepResult(turn.reward, main.score, text, main.status == "finished", main.logs))
            else:
                turns.append(StepResult(turn.reward, None, text, False, {}))
        return Episode(str(decode(main.tokens[: main.prompt_length])), turns)
