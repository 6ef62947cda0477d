"""Episodes of an agent with a policy that says what it is told to: the side that runs in a process of its own.

Of an agent only its methods are known, so that any class fits:

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
    """What an agent did against its contract."""


@dataclass(frozen=True)
class Episode:
    """What a whole episode gave."""

    observation: Any
    turns: list[StepResult]

    @property
    def ended(self) -> bool:
        return bool(self.turns) and self.turns[-1].done


@dataclass
class Played:
    """What a request gave."""

    episodes: list[Episode] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Calls that changed the states they were given, and how."""


class EpisodeRunner:
    """Plays episodes with instances of one agent."""

    def __init__(self, agent: Any, max_turns: int, emit: Callable[[str, str], None]) -> None:
        """`emit` is given "begin" or "end", and of which call."""
        self.played = Played()
        self._agent = agent
        self._max_turns = max_turns
        self._emit = emit

    async def run(self, how: str, samples: Sequence[Sample]) -> list[Episode]:
        """Play the samples by the method `how`."""
        return await getattr(self, how)(samples)

    async def alone(self, samples: Sequence[Sample]) -> list[Episode]:
        """Play one after the other, each with an instance of its own."""
        return [
            await self._begin_waiting(self._make(), sample, f"episode {number}")
            for number, sample in enumerate(samples)
        ]

    async def together(self, samples: Sequence[Sample]) -> list[Episode]:
        """Play all at once, each with an instance of its own."""
        plays = [
            self._begin_waiting(self._make(), sample, f"episode {number}") for number, sample in enumerate(samples)
        ]
        return list(await asyncio.gather(*plays))

    async def nested(self, samples: Sequence[Sample]) -> list[Episode]:
        """Play the second of two episodes between the reset and the first step of the other, by another instance."""
        inner: list[Episode] = []

        async def meanwhile() -> None:
            inner.append(await self._begin_waiting(self._make(), samples[1], "episode 1"))

        return [await self._begin_waiting(self._make(), samples[0], "episode 0", meanwhile), *inner]

    async def again(self, samples: Sequence[Sample]) -> list[Episode]:
        """Play all with one instance, after an episode that is left in the middle."""
        agent = self._make()
        await self._begin_waiting(agent, samples[0], "an episode that is left", max_turns=1)
        return [await self._begin_waiting(agent, sample, f"episode {number}") for number, sample in enumerate(samples)]

    async def unless_refused(self, samples: Sequence[Sample]) -> list[Episode]:
        """Play, unless ValueError says why not."""
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
                f"{self._agent.__name__}() raised {error}; an agent is made without arguments, by an __init__ that is "
                "not async"
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
        text, turns = _text(observation), []
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


def _read(reader: Callable[..., Any], *found: Any) -> Any:
    """Read as training does."""
    try:
        return reader(*found)
    except ValueError as error:
        raise Fault(str(error)) from error


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "".join(str(message["content"]) for message in value)


def _runner_of(agent: Any) -> type[EpisodeRunner]:
    """Return what plays the episodes of an agent: its own executor, or a runner of its `reset` and `step`."""
    if not issubclass(agent if inspect.isclass(agent) else type(agent), AgentExecutorBase):
        return EpisodeRunner
    # Not at the top: it imports this file, and a tokenizer, which takes seconds.
    from tests.contracts.executors import ExecutorRunner

    return ExecutorRunner


def serve(connection: Connection, address: str, max_turns: int) -> None:
    """Answer requests of how to play which samples, until the connection closes."""
    try:
        agent = load_value(address, "agent")
    except BaseException as error:  # noqa: BLE001 - the agent's module may raise anything, SystemExit included
        connection.send(("raised", "".join(traceback.format_exception(error))))
        return
    connection.send(("ready", ""))

    def emit(what: str, call: str) -> None:
        connection.send((what, call))

    while True:
        try:
            how, samples = connection.recv()
        except EOFError:
            return
        try:
            runner = _runner_of(agent)(agent, max_turns, emit)
            runner.played.episodes = asyncio.run(runner.run(how, samples))
            connection.send(("played", runner.played))
        except Fault as fault:
            connection.send(("fault", str(fault)))
        except BaseException as error:  # noqa: BLE001 - the agent may raise anything, SystemExit included
            connection.send(("raised", "".join(traceback.format_exception(error))))
