"""Episodes of an agent with a policy of fixed texts, in a separate process.

Any class with these methods is an agent:

    async reset({"observation": prompt, "label": label, "extra_info": columns}) -> {"observation": text or messages}
    async step({"observation_text", "action_text", "finish", "label", "sampling_params"})
        -> {"rewards", "scores"?, "environment_feedback", "done", "sampling_params"?, "extra_logs"?}
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from agents.episode import AgentExecutorBase
from agents.schema import StepResult, read_reset, read_sampling, read_step, sampling_params
from components.generate.config import SamplingConfig
from tests.contracts.samples import Sample
from tests.contracts.targets import load_value

SAMPLING = SamplingConfig(max_new_tokens=64)
STOP = ["\n\n"]


class Fault(Exception):
    """Raised when an agent violates its contract."""


@dataclass(frozen=True)
class Episode:
    """Result of one episode."""

    observation: Any
    turns: list[StepResult]

    @property
    def ended(self) -> bool:
        return bool(self.turns) and self.turns[-1].done


@dataclass
class Played:
    """Result of a request."""

    episodes: list[Episode] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Descriptions of calls that have changed their `states`."""


class EpisodeRunner:
    """Runs episodes with instances of one agent."""

    def __init__(self, agent: Any, max_turns: int, emit: Callable[[str, str], None]) -> None:
        """
        Args:
            agent: class or instance of the agent.
            max_turns: maximum number of turns of an episode.
            emit: callback that receives "begin" or "end", and the name of a call.
        """
        self.played = Played()
        self._agent = agent
        self._max_turns = max_turns
        self._emit = emit

    async def run(self, method: str, samples: Sequence[Sample]) -> list[Episode]:
        """Run episodes of the samples by one of the methods below."""
        return await getattr(self, method)(samples)

    async def alone(self, samples: Sequence[Sample]) -> list[Episode]:
        """Run one episode after the other, each with a new instance."""
        return [
            await self._begin_waiting(self._make(), sample, f"episode {number}")
            for number, sample in enumerate(samples)
        ]

    async def together(self, samples: Sequence[Sample]) -> list[Episode]:
        """Run all episodes concurrently, each with a new instance."""
        plays = [
            self._begin_waiting(self._make(), sample, f"episode {number}") for number, sample in enumerate(samples)
        ]
        return list(await asyncio.gather(*plays))

    async def nested(self, samples: Sequence[Sample]) -> list[Episode]:
        """Run a second episode with another instance between the reset and the first step of the first one."""
        inner: list[Episode] = []

        async def meanwhile() -> None:
            inner.append(await self._begin_waiting(self._make(), samples[1], "episode 1"))

        return [await self._begin_waiting(self._make(), samples[0], "episode 0", meanwhile), *inner]

    async def again(self, samples: Sequence[Sample]) -> list[Episode]:
        """Run all episodes with one instance, after an unfinished episode."""
        agent = self._make()
        await self._begin_waiting(agent, samples[0], "an unfinished episode", max_turns=1)
        return [await self._begin_waiting(agent, sample, f"episode {number}") for number, sample in enumerate(samples)]

    async def unless_refused(self, samples: Sequence[Sample]) -> list[Episode]:
        """Run the episodes, or return an empty list if the agent raises ValueError."""
        try:
            return await self.alone(samples)
        except ValueError:
            return []

    def _make(self) -> Any:
        if not inspect.isclass(self._agent):
            return copy.deepcopy(self._agent)
        self._emit("begin", "making an instance")
        try:
            return self._agent()
        except TypeError as error:
            raise Fault(
                f"{self._agent.__name__}() raised {error}; an agent is constructed without arguments, by an __init__ "
                "that is not async"
            ) from error
        finally:
            self._emit("end", "making an instance")

    async def _begin_waiting(
        self,
        agent: Any,
        sample: Sample,
        name: str,
        after_reset: Callable[[], Awaitable[None]] | None = None,
        max_turns: int | None = None,
    ) -> Episode:
        states: dict[str, Any] = {"observation": sample.prompt, "label": copy.deepcopy(sample.label)}
        states["extra_info"] = copy.deepcopy(dict(sample.columns))
        observation, _ = _read(read_reset, await self._call(agent, "reset", states, f"reset of {name}"))
        if after_reset is not None:
            await after_reset()
        text = _text(observation)
        turns: list[StepResult] = []
        for number in range(max_turns or self._max_turns):
            action = sample.actions[number % len(sample.actions)]
            states = {
                "observation_text": text,
                "action_text": action,
                "label": copy.deepcopy(sample.label),
                "finish": "stop",
                "sampling_params": sampling_params(SAMPLING, STOP),
            }
            turn = _read(
                read_step, await self._call(agent, "step", states, f"step {number} of {name}"), f"step {number}"
            )
            if turn.sampling_params is not None:
                _read(read_sampling, turn.sampling_params, SAMPLING)
            turns.append(turn)
            text += action + _text(turn.feedback)
            if turn.done:
                break
        return Episode(observation, turns)

    async def _call(self, agent: Any, method: str, states: dict[str, Any], name: str) -> Any:
        before = copy.deepcopy(states)
        self._emit("begin", name)
        result = getattr(agent, method)(states)
        if not inspect.isawaitable(result):
            raise Fault(f"{method} returned a {type(result).__name__} that cannot be awaited; write async def {method}")
        result = await result
        self._emit("end", name)
        if states != before:
            key = next(k for k in {**before, **states} if k not in before or k not in states or before[k] != states[k])
            change = f"from {before.get(key)!r:.80} to {states.get(key)!r:.80}"
            self.played.changed.append(f"{name} changed states[{key!r}] {change}")
        return result


def _read(reader: Callable[..., Any], *arguments: Any) -> Any:
    """Check a return value with the code of training."""
    try:
        return reader(*arguments)
    except ValueError as error:
        raise Fault(str(error)) from error


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "".join(str(message["content"]) for message in value)


def _runner_of(agent: Any) -> type[EpisodeRunner]:
    """Return the class that runs the episodes of an agent: for an executor, or for an agent with `reset` and `step`."""
    if not issubclass(agent if inspect.isclass(agent) else type(agent), AgentExecutorBase):
        return EpisodeRunner
    # Imported here, because it imports this file, and a tokenizer takes seconds to import.
    from tests.contracts.executors import ExecutorRunner

    return ExecutorRunner


def serve(connection: Connection, address: str, max_turns: int) -> None:
    """Serve requests (method, samples) until the connection is closed."""
    try:
        agent = load_value(address, "agent")
    except BaseException as error:  # noqa: BLE001 - the agent's module may raise anything, including SystemExit
        connection.send(("raised", "".join(traceback.format_exception(error))))
        return
    connection.send(("ready", ""))

    def emit(kind: str, call: str) -> None:
        connection.send((kind, call))

    while True:
        try:
            method, samples = connection.recv()
        except EOFError:
            return
        try:
            runner = _runner_of(agent)(agent, max_turns, emit)
            runner.played.episodes = asyncio.run(runner.run(method, samples))
            connection.send(("played", runner.played))
        except Fault as fault:
            connection.send(("fault", str(fault)))
        except BaseException as error:  # noqa: BLE001 - the agent may raise anything, including SystemExit
            connection.send(("raised", "".join(traceback.format_exception(error))))
