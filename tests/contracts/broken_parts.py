"""Parts that each violate one contract, for `test_broken_parts.py`."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Sequence
from typing import Any

Rewards = dict[str, Any]


def constant(queries: Sequence[str], **more: Any) -> Rewards:
    return {"rewards": [0.5] * len(queries), **more}


def one_for_all(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    return {"rewards": [0.5]}


def drawn(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    return {"rewards": [random.random() for _ in queries]}


def hashed(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    # The hash of a text is different in each process.
    return {"rewards": [hash(query) % 1000 for query in queries]}


def centred(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    lengths = [len(query) for query in queries]
    return {"rewards": [length - sum(lengths) / len(lengths) for length in lengths]}


def sorted_rewards(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    return {"rewards": sorted(len(query) for query in queries)}


def tidying(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    queries.sort()
    return constant(queries)


def word_count(queries: list[str], prompts: list[str], labels: list[Any], responses: list[str]) -> Rewards:
    return {"rewards": [len(response) / len(response.split()) for response in responses]}


def label_text(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    return {"rewards": [float(label.strip() in query) for query, label in zip(queries, labels)]}


def percent(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    return constant(queries, scores=[50.0] * len(queries))


def text_logs(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    return constant(queries, extra_logs={"verdict": ["good"] * len(queries)})


def hanging(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    threading.Event().wait()
    return constant(queries)


def slow_when_long(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    if max(map(len, queries)) > 50_000:
        threading.Event().wait()
    return constant(queries)


def dying(queries: list[str], prompts: list[str], labels: list[Any]) -> Rewards:
    if any("\x00" in query for query in queries):
        os._exit(3)
    return constant(queries)


class Agent:
    """A correct agent: three turns, each with a reward."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, states: dict[str, Any]) -> dict[str, Any]:
        self.turns = 0
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any]) -> dict[str, Any]:
        self.turns += 1
        return self.result(self.turns)

    def result(self, turns: int) -> dict[str, Any]:
        return {"rewards": 1.0, "scores": 1.0, "environment_feedback": f"turn {turns}", "done": turns >= 3}


class Endless(Agent):
    def result(self, turns: int) -> dict[str, Any]:
        return {**super().result(0), "done": False}


class Unfinished(Agent):
    def result(self, turns: int) -> dict[str, Any]:
        return {"rewards": 1.0, "done": turns >= 3}


class Raising(Agent):
    async def step(self, states: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("board")


class Forgetful(Agent):
    """Its reset does not reset the number of turns."""

    async def reset(self, states: dict[str, Any]) -> dict[str, Any]:
        return {"observation": states["observation"]}


class Shared(Agent):
    """All instances share one number of turns, which reset sets to 0."""

    count = 0

    async def reset(self, states: dict[str, Any]) -> dict[str, Any]:
        Shared.count = 0
        return await super().reset(states)

    async def step(self, states: dict[str, Any]) -> dict[str, Any]:
        # Lets other episodes run, as an environment that waits would.
        await asyncio.sleep(0)
        Shared.count += 1
        return self.result(Shared.count)


class Writing(Agent):
    async def step(self, states: dict[str, Any]) -> dict[str, Any]:
        states["sampling_params"].max_tokens = 1
        return await super().step(states)


class Drawing(Agent):
    def result(self, turns: int) -> dict[str, Any]:
        return {**super().result(turns), "rewards": random.random()}


class Blocking(Agent):
    async def reset(self, states: dict[str, Any]) -> dict[str, Any]:
        # Blocks the event loop, as an environment that is not written for asyncio does.
        threading.Event().wait()
        return await super().reset(states)


class Crashing(Agent):
    async def step(self, states: dict[str, Any]) -> dict[str, Any]:
        if "\x00" in states["action_text"]:
            os._exit(3)
        return await super().step(states)


class Unmade(Agent):
    """Its __init__ is async, so it cannot be constructed. README files of other projects have such agents."""

    async def __init__(self) -> None:
        self.turns = 0


class Plain(Agent):
    def reset(self, states: dict[str, Any]) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"observation": states["observation"]}
