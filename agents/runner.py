"""Everything of a rollout role but its process: an engine, and the episodes that are run with it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from agents.episode import AgentExecutorBase, Episode, EpisodeTask, Policy
from agents.episode_batch import as_batch
from agents.executor import SingleTurnAgentExecutor
from agents.loading import load_agent
from agents.options import AgentOptions
from agents.rendering import decode
from components.batch import Batch
from components.data.reward_workers import FEW_FAILURES, allowed_failures
from components.data.rewards import RewardError
from components.data.text import TextEncoder
from components.engines.async_engine import AsyncEngine, Generation, Request
from components.engines.batched_engine import BatchedEngine
from components.engines.opening import open_async_engine, open_rollout_engine
from components.engines.rollout_engine import RolloutEngine
from components.hub import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.engines.config import RolloutConfig, SamplingConfig
    from components.engines.weight_sync import WeightHandle

WINDOW = 256
"""Of so many episodes, the last ones, the share that failed is taken where episodes have no batch of their own."""
STREAMS = 2**32
"""More samples than any prompt has: sequence k of a sample draws the numbers of sample k * STREAMS + sample_id."""
_PLAIN = ("tokens", "action_mask", "rollout_logprob", "prompt_length", "truncated", "weight_version")
"""The columns that an engine itself makes."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collected:
    """What has finished since it was last asked."""

    batch: Batch | None
    """Whole groups, all samples of a prompt side by side, in the order in which they finished."""
    in_flight: list[int]
    """The `prompt_id` of each group that is still being run."""


class EpisodeRunner:
    """Plays episodes with one engine. Nothing happens between calls.

    Without an agent, an engine that draws whole batches is asked for one, and there are no episodes. Otherwise episodes
    run in an asyncio loop of the runner's own, in the thread that calls it: `options.concurrency` at a time, begun
    in the order in which they came.
    """

    def __init__(
        self,
        engine: RolloutEngine | AsyncEngine,
        executor: AgentExecutorBase | None = None,
        options: AgentOptions | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        loop_runner: asyncio.Runner | None = None,
    ) -> None:
        """
        Args:
            engine: the runner closes it.
            executor: runs the episodes; default: single turns. Unused with a `RolloutEngine`, like what follows.
            options: of the episodes.
            tokenizer: of the policy; needed with an `AsyncEngine`.
            loop_runner: of the loop in which the engine was opened.
        """
        self.engine = engine
        self.options = options or AgentOptions()
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._finished: list[tuple[Batch, list[list[Episode]]]] = []
        self._failures = _Failures(self.options.max_failed_share)
        if isinstance(engine, RolloutEngine):
            return
        assert tokenizer is not None, "an AsyncEngine's runner needs a tokenizer"
        self.encoder = TextEncoder(tokenizer)
        self._executor = executor or SingleTurnAgentExecutor()
        self._executor.open(self.options)
        self._slots = asyncio.Semaphore(self.options.concurrency)
        self._loop_runner = loop_runner or asyncio.Runner()

    @property
    def weight_version(self) -> int:
        """Of the engine's weights; 0: as loaded."""
        return self.engine.weight_version

    def run_episodes(self, prompts: Batch, sampling: SamplingConfig, *, alone: bool = False) -> Batch:
        """Play one episode for each prompt.

        Args:
            prompts: as `RolloutEngine.generate` takes them; agents read the objects `prompt` and `label`.
            sampling: how turns are drawn; a turn has at most `max_new_tokens`, and fewer where there is less room.
            alone: leave the agent out: one response each, with the columns of `RolloutEngine.generate`.

        Returns:
            What `as_batch` says, in the order of `prompts`; of a `RolloutEngine` what that returns.

        Raises:
            RewardError: more episodes ended as errors than `options.max_failed_share` allows.
            RuntimeError: the engine failed.
        """
        if isinstance(self.engine, RolloutEngine):
            return self.engine.generate(prompts, sampling)
        failures = _Failures(self.options.max_failed_share, len(prompts))
        batch = as_batch(prompts, self._run(self._run_all(prompts, sampling, failures, alone)), self.weight_version)
        return batch.only(*prompts.per_sequence, *prompts.objects, *_PLAIN) if alone else batch

    def begin(self, prompts: Batch, sampling: SamplingConfig) -> None:
        """Begin groups of episodes, which continue whenever the runner is called.

        Args:
            prompts: as for `run_episodes`; those with the same `prompt_id` are a group, which `collect` returns as a
            whole.
            sampling: as for `run_episodes`.
        """
        for prompt_id, rows in prompts.group_by("prompt_id").items():
            if prompt_id in self._groups:
                raise ValueError(f"prompt {prompt_id} is being run already; collect it before it begins again")
            self._groups[prompt_id] = self._loop_runner.get_loop().create_task(self._run_group(rows, sampling))

    def collect(self, seconds: float) -> Collected:
        """Let them play until a group has finished, at most for so many seconds.

        Raises:
            RuntimeError: of the last WINDOW episodes more failed than `options.max_failed_share` allows (of fewer, all
                and more than a few), or the engine failed.
        """
        if self._groups:
            self._run(asyncio.wait(self._groups.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED))
        for prompt_id, group in list(self._groups.items()):
            if group.done():
                del self._groups[prompt_id]
                group.result()
        finished, self._finished = self._finished, []
        if not finished:
            return Collected(None, list(self._groups))
        prompts = Batch.concat([rows for rows, _ in finished])
        played = [episodes for _, group in finished for episodes in group]
        return Collected(as_batch(prompts, played, self.weight_version), list(self._groups))

    def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        """Draw with published weights from here on; episodes in flight continue with them. Raises what the engine
        does.
        """
        if isinstance(self.engine, RolloutEngine):
            self.engine.receive(handle, verify)
        else:
            self._run(self.engine.receive(handle, verify))

    def sleep(self, level: int = 1) -> int:
        """Free the accelerator's memory until `wake`, as `RolloutEngine.sleep`; returns how many bytes."""
        return self._batch_engine.sleep(level)

    def wake(self, for_weights: bool = False) -> None:
        """Undo `sleep`, as `RolloutEngine.wake`."""
        self._batch_engine.wake(for_weights)

    def close(self) -> None:
        """End the episodes that are still being run, what the agent has started, and the engine."""
        if not isinstance(self.engine, RolloutEngine):
            self._run(self._close())
        self.engine.close()
        if not isinstance(self.engine, RolloutEngine):
            self._loop_runner.close()

    @property
    def _batch_engine(self) -> RolloutEngine:
        engine = self.engine.engine if isinstance(self.engine, BatchedEngine) else self.engine
        if isinstance(engine, RolloutEngine):
            return engine
        raise ValueError("vllm does not sleep while it runs episodes; turn its sleeping off, or use the engine hf")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop_runner.run(work)

    async def _close(self) -> None:
        for group in self._groups.values():
            group.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)
        await self._executor.close()

    async def _run_group(self, prompts: Batch, sampling: SamplingConfig) -> None:
        played = await self._run_all(prompts, sampling, self._failures)
        self._finished.append((prompts, played))

    async def _run_all(
        self, prompts: Batch, sampling: SamplingConfig, failures: _Failures, alone: bool = False
    ) -> list[list[Episode]]:
        """Play all; the first thing that ends the run ends them all."""
        texts, labels, sources = (prompts.objects.get(name) for name in ("prompt", "label", "datasource"))
        ids = (prompts["prompt_id"].tolist(), prompts["sample_id"].tolist())
        executor = SingleTurnAgentExecutor() if alone else self._executor
        stop = [] if alone else self.options.stop
        played: list[list[Episode]] = [[] for _ in range(len(prompts))]
        todo = enumerate(zip(*ids, prompts.lists("tokens"), strict=True))

        async def play_on() -> None:
            for i, (prompt_id, sample_id, tokens) in todo:
                text = texts[i] if texts else decode(self.encoder.tokenizer, tokens)
                label, source = labels[i] if labels else None, sources[i] if sources else ""
                task = EpisodeTask(tokens, text, label, prompt_id, sample_id, sampling, source)
                played[i] = await self._episode(task, _EnginePolicy(self, task, stop), executor, failures)

        try:
            async with asyncio.TaskGroup() as group:
                # No more tasks than slots: thousands that wait would keep the garbage collector busy.
                for _ in range(min(len(prompts), self.options.concurrency)):
                    group.create_task(play_on())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return played

    async def _episode(
        self, task: EpisodeTask, policy: _EnginePolicy, executor: AgentExecutorBase, failures: _Failures
    ) -> list[Episode]:
        async with self._slots:
            try:
                episodes = _checked(await executor.execute(task, policy))
            except Exception as error:  # noqa: BLE001 - an agent may raise anything, and ends its own episode alone
                episodes = [Episode(list(task.tokens), len(task.tokens))]
                episodes[0].fail(f"{type(error).__name__}: {first_line(error)}", traceback.format_exc())
        if policy.broken is not None:
            raise policy.broken
        for branch, episode in enumerate(episodes):
            episode.branch = branch
            if not episode.turns and policy.max_tokens is not None:
                # Nothing is learnt from it; a trainer's model need not read more than it can.
                episode.cut(policy.max_tokens)
        failures.add(task, episodes[0])
        return episodes


class _EnginePolicy(Policy):
    """The policy, as one episode asks it."""

    def __init__(self, runner: EpisodeRunner, task: EpisodeTask, stop: Sequence[str]) -> None:
        assert isinstance(runner.engine, AsyncEngine)
        self._engine, self._task = runner.engine, task
        self.encoder, self.tokenizer, self.stop = runner.encoder, runner.encoder.tokenizer, stop
        limits = [limit for limit in (runner.options.max_tokens, self._engine.positions) if limit is not None]
        self.max_tokens, self.max_turns = min(limits, default=None), runner.options.max_turns
        self.broken: Exception | None = None
        """What the engine raised: not the episode's fault, and not for its executor to deal with."""

    async def draw(
        self, tokens: Sequence[int], sampling: SamplingConfig, stop: Sequence[str] = (), stream: int = 0
    ) -> tuple[Generation, int]:
        if not tokens or not self.has_space(len(tokens)):
            raise ValueError(f"a sequence of {len(tokens)} tokens, of at most {self.max_tokens}, cannot be continued")
        if self.max_tokens is not None and len(tokens) + sampling.max_new_tokens > self.max_tokens:
            sampling = dataclasses.replace(sampling, max_new_tokens=self.max_tokens - len(tokens))
        ids = {"prompt_id": self._task.prompt_id, "sample_id": stream * STREAMS + self._task.sample_id}
        request: Request | None = None
        try:
            request = self._engine.submit(tokens, sampling, **ids)
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
                    return dataclasses.replace(drawn, finish="stop"), self._place(seen, stop)
        drawn = await request.result()
        return drawn, len(drawn.tokens)

    def _holds(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        written = decode(self.tokenizer, tokens)
        return any(text in written for text in stop)

    def _place(self, tokens: Sequence[int], stop: Sequence[str]) -> int:
        """How many tokens it takes until a text is complete."""
        without, complete = 0, len(tokens)
        while complete - without > 1:
            middle = (without + complete) // 2
            without, complete = (without, middle) if self._holds(tokens[:middle], stop) else (middle, complete)
        return complete


class _Failures:
    """Counts episodes that end as errors, and ends a run with too many."""

    def __init__(self, share: float, count: int | None = None) -> None:
        """
        Args:
            share: of the episodes that may fail.
            count: of them; None: there is no end, and the last WINDOW count.
        """
        self._share, self._count = share, count
        self._failed: deque[bool] = deque(maxlen=count or WINDOW)
        self._first: Episode | None = None

    def add(self, task: EpisodeTask, episode: Episode) -> None:
        """Count one; RewardError when it is one too many."""
        self._failed.append(episode.status == "error")
        if episode.status != "error":
            return
        if self._first is None:
            self._first = episode
            who = f"sample {task.sample_id} of prompt {task.prompt_id}"
            _log.warning("the episode of %s is an error: %s\n%s", who, episode.error, episode.trace)
        failed, seen = sum(self._failed), len(self._failed)
        count = self._count or (seen if failed == seen > FEW_FAILURES else WINDOW)
        if failed > allowed_failures(count, self._share):
            error = RewardError(
                f"{failed} of {count} episodes ended as errors, more than agent.max_failed_share={self._share:g} "
                f"allows; the first: {self._first.error}"
            )
            if self._first.trace:
                error.add_note(self._first.trace)
            raise error


def _checked(played: Any) -> list[Episode]:
    """What an executor returned, if it is what it should be."""
    episodes = list(played) if isinstance(played, list | tuple) else [played]
    if not episodes or not all(isinstance(episode, Episode) for episode in episodes):
        raise ValueError(
            f"execute returned {played!r:.80}; return an Episode, or a list of them with the main one first"
        )
    for episode in episodes:
        if not len(episode.tokens) == len(episode.logprobs) == len(episode.versions):
            raise ValueError("an Episode's tokens, logprobs and versions differ in length; append with act and observe")
    return episodes


def open_runner(
    model_path: str,
    engine: RolloutConfig,
    agent: AgentOptions,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    *,
    in_flight: bool = False,
) -> EpisodeRunner:
    """A runner with an engine of its own.

    Args:
        model_path: folder or hub name of the policy.
        engine: its configuration.
        agent: the options of episodes; without an agent, responses are single turns.
        tokenizer: loads the policy's, where it is needed.
        in_flight: `begin` and `collect` will be used.
    """
    if agent.func_path is None and not in_flight:
        return EpisodeRunner(open_rollout_engine(model_path, engine))
    if agent.func_path is None:
        # Plain responses, as many at a time as the engine takes.
        agent = dataclasses.replace(agent, concurrency=max(agent.concurrency, engine.max_rows))
    executor = load_agent(agent.func_path) if agent.func_path else SingleTurnAgentExecutor()
    loop_runner = asyncio.Runner()
    runner = EpisodeRunner(
        loop_runner.run(open_async_engine(model_path, engine)), executor, agent, tokenizer(), loop_runner
    )
    settle()
    return runner


def settle() -> None:
    """Take all that is loaded out of the garbage collector's sight, which would look at it again with each wave of
    episodes, and keep the engine waiting.
    """
    gc.collect()
    gc.freeze()
