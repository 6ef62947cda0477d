"""Measure the utilisation of an engine's slots while many multi-turn episodes run.

    python scripts/bench_agents.py                    2,000 episodes of 4 turns, 64 at a time, 20 ms per response
    python scripts/bench_agents.py --wait 0.005       each environment step also waits for 5 ms
    python scripts/bench_agents.py --runs-in process --episodes 500

The runner, its executor and the environments are those of a run. Only the engine is replaced: it samples nothing, and
returns the same response after a fixed time. The ideal time is episodes * turns * (answer + wait) / slots; the printed
share is the ideal time divided by the measured one. For comparison, as many tasks as slots only sleep as often and as
long. Their loss is that of asyncio and the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agents.loading import load_agent  # noqa: E402 (may not be installed)
from agents.options import AgentOptions  # noqa: E402
from agents.runner import EpisodeRunner, settle  # noqa: E402
from components.batch import Batch  # noqa: E402
from components.generate.async_engine import AsyncEngine, Generation, Piece, Request  # noqa: E402
from components.generate.config import SamplingConfig  # noqa: E402
from components.weights.publisher import WeightHandle  # noqa: E402
from plugins.demo.tiny_model import character_tokenizer  # noqa: E402

PROMPT = "play"
ANSWER = "a move to make"
FEEDBACK = "and one in return"


@dataclass(frozen=True)
class Load:
    """Number and durations of the episodes."""

    episodes: int
    turns: int = 4
    slots: int = 64
    answer_s: float = 0.02
    wait_s: float = 0.0
    runs_in: Literal["loop", "thread", "process"] = "loop"

    @property
    def ideal_s(self) -> float:
        """Seconds if only the engine and the waits took time."""
        return self.episodes * self.turns * (self.answer_s + self.wait_s) / self.slots


class TimedRequest(Request):
    """A request whose response is available after a fixed time."""

    def __init__(self, tokens: list[int], seconds: float) -> None:
        self._drawn = Generation(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop")
        self._seconds = seconds

    async def __aiter__(self) -> AsyncIterator[Piece]:
        drawn = await self.result()
        yield Piece(drawn.tokens, drawn.logprobs)

    async def result(self) -> Generation:
        await asyncio.sleep(self._seconds)
        return self._drawn

    async def abort(self) -> Generation:
        return self._drawn


class TimedEngine(AsyncEngine):
    """An engine that returns the same response to every request after the same time."""

    def __init__(self, tokens: list[int], seconds: float) -> None:
        super().__init__()
        self._tokens = tokens
        self._seconds = seconds

    def submit(
        self, tokens: Sequence[int], sampling: SamplingConfig, *, prompt_id: int = 0, sample_id: int = 0
    ) -> Request:
        del tokens, sampling, prompt_id, sample_id
        return TimedRequest(self._tokens, self._seconds)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def metrics(self) -> dict[str, float]:
        return {}

    async def sleep(self, level: int = 1) -> int:
        del level
        return 0

    async def wake(self, for_weights: bool = False) -> None: ...

    async def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        raise NotImplementedError("it has no weights")

    def close(self) -> None: ...

    def _parameters(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {}


AGENT = f"""
import asyncio
from agents import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    # Lasts as many turns as the label has, and waits in each.
    async def reset(self, states, **kwargs):
        self.left, self.wait_s = states["label"]
        return {{"observation": states["observation"]}}

    async def step(self, states, **kwargs):
        self.left -= 1
        if self.wait_s:
            await asyncio.sleep(self.wait_s)
        return {{"rewards": 1.0, "scores": 1.0, "environment_feedback": {FEEDBACK!r}, "done": not self.left}}
"""


def run_episodes(load: Load) -> float:
    """Run all episodes. Return the seconds that they took."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, ANSWER))
    end = tokenizer.convert_tokens_to_ids(str(tokenizer.eos_token))
    assert isinstance(end, int)
    count = load.episodes
    prompts = Batch(
        [len(prompt)] * count,
        {"tokens": torch.tensor(prompt * count)},
        {"prompt_id": torch.arange(count), "sample_id": torch.zeros(count, dtype=torch.int64)},
        {"prompt": [PROMPT] * count, "label": [(load.turns, load.wait_s)] * count},
    )
    engine = TimedEngine([*answer, end], load.answer_s)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "agent.py"
        file.write_text(AGENT)
        agent_options = AgentOptions(
            func_path=str(file), runs_in=load.runs_in, max_turns=load.turns, concurrency=load.slots
        )
        runner = EpisodeRunner(engine, load_agent(str(file)), agent_options, tokenizer)
        try:
            began = time.perf_counter()
            played = runner.generate(prompts, SamplingConfig(max_new_tokens=32))
            seconds = time.perf_counter() - began
        finally:
            runner.close()
    # An episode that failed is short, and would make the measured time too good.
    assert played["reward"].tolist() == [float(load.turns)] * count, played.objects["error"]
    return seconds


async def only_wait(load: Load) -> float:
    """Sleep as the slots do, and do nothing else. Return the seconds that it took."""

    async def wait() -> None:
        for _ in range(load.episodes * load.turns // load.slots):
            await asyncio.sleep(load.answer_s)
            if load.wait_s:
                await asyncio.sleep(load.wait_s)

    began = time.perf_counter()
    await asyncio.gather(*(wait() for _ in range(load.slots)))
    return time.perf_counter() - began


def main() -> None:
    """Print a line per round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--answer", type=float, default=0.02, help="seconds per response of the engine")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that the environment waits per step")
    parser.add_argument("--runs-in", choices=["loop", "thread", "process"], default="loop")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load = Load(options.episodes, options.turns, options.slots, options.answer, options.wait, options.runs_in)
    run_episodes(dataclasses.replace(load, episodes=options.slots))  # a warm-up: imports and caches are not measured
    settle()  # a rollout process does the same
    for _ in range(options.rounds):
        started = time.process_time()
        seconds = run_episodes(load)
        cpu = (time.process_time() - started) / (load.episodes * load.turns)
        print(
            f"{seconds:.2f} s, ideal {load.ideal_s:.2f} s: {load.ideal_s / seconds:.1%}; CPU time of this process per "
            f"turn: {1e6 * cpu:.0f} us; tasks that only wait: {load.ideal_s / asyncio.run(only_wait(load)):.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
