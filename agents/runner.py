"""Episodes that are run with an engine: the `Sampler` of rollout roles with an agent or with responses in flight."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from agents.episode import AgentExecutorBase, Episode, EpisodeTask, Policy
from agents.episode_batch import as_batch
from agents.executor import SingleTurnAgentExecutor
from agents.loading import load_agent
from agents.options import AgentOptions
from components.batch import Batch
from components.data.text import TextEncoder
from components.generate.async_engine import AsyncEngine
from components.generate.async_opening import open_async_engine
from components.generate.sampler import Collected
from components.process.child_process import described
from components.rewards.errors import RewardError
from components.rewards.workers import FEW_FAILURES, allowed_failures

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.generate.config import RolloutConfig, SamplingConfig
    from components.weights.publisher import WeightHandle

WINDOW = 256
"""Of so many episodes, the last ones, the share that failed is taken where episodes have no batch of their own."""
_log = logging.getLogger(__name__)


class EpisodeRunner:
    """Runs episodes with one engine. Nothing happens between calls.

    Episodes run in an asyncio loop of the runner's own, in the thread that calls it: `options.concurrency` at a time,
    started in the order in which they came.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        executor: AgentExecutorBase | None,
        options: AgentOptions,
        tokenizer: PreTrainedTokenizerBase,
        loop_runner: asyncio.Runner | None = None,
    ) -> None:
        """
        Args:
            engine: the runner closes it.
            executor: runs the episodes; None: single turns.
            options: of the episodes.
            tokenizer: of the policy.
            loop_runner: of the loop in which the engine was opened.
        """
        self.engine = engine
        self.options = options
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._finished: list[tuple[Batch, list[list[Episode]]]] = []
        self._failures = _Failures(self.options.max_failed_share)
        self._executor = executor or SingleTurnAgentExecutor()
        self._executor.open(self.options)
        self._slots = asyncio.Semaphore(self.options.concurrency)
        self._loop_runner = loop_runner or asyncio.Runner()
        self.encoder = TextEncoder(tokenizer)

    @property
    def weight_version(self) -> int:
        """Version of the weights that are in use."""
        return self.engine.weight_version

    @property
    def has_weights(self) -> bool:
        """False after a sleep that dropped the weights."""
        return self.engine.has_weights

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Run one episode for each prompt.

        Args:
            prompts: as `RolloutEngine.generate` takes them; agents read the objects `prompt` and `label`.
            sampling: how turns are drawn; a turn has at most `max_new_tokens`, and fewer where there is less space.

        Returns:
            The batch of `as_batch`, in the order of `prompts`.

        Raises:
            RewardError: more episodes ended as errors than `options.max_failed_share` allows.
            RuntimeError: the engine failed.
        """
        failures = _Failures(self.options.max_failed_share, len(prompts))
        episodes = self._loop_runner.run(self._run_all(prompts, sampling, failures))
        return as_batch(prompts, episodes, self.engine.weight_version)

    def begin(self, prompts: Batch, sampling: SamplingConfig) -> None:
        """Begin groups of episodes, which continue whenever the runner is called.

        Args:
            prompts: as for `generate`; those with the same `prompt_id` are a group, which `collect` returns as a
                whole.
            sampling: as for `generate`.
        """
        for prompt_id, rows in prompts.group_by("prompt_id").items():
            if prompt_id in self._groups:
                raise ValueError(f"prompt {prompt_id} is being run already; collect it before it begins again")
            self._groups[prompt_id] = self._loop_runner.get_loop().create_task(self._run_group(rows, sampling))

    def collect(self, seconds: float) -> Collected:
        """Let them run until a group has finished, at most for so many seconds.

        Raises:
            RuntimeError: of the last WINDOW episodes more failed than `options.max_failed_share` allows (of fewer, all
                and more than a few), or the engine failed.
        """
        if self._groups:
            waiting = asyncio.wait(self._groups.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self._loop_runner.run(waiting)
        for prompt_id, group in list(self._groups.items()):
            if group.done():
                del self._groups[prompt_id]
                group.result()
        finished, self._finished = self._finished, []
        if not finished:
            return Collected(None, list(self._groups))
        prompts = Batch.concat([rows for rows, _ in finished])
        episodes = [sequences for _, group in finished for sequences in group]
        return Collected(as_batch(prompts, episodes, self.engine.weight_version), list(self._groups))

    def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        """Draw with published weights from here on; episodes in flight continue with them. Raises what the engine
        does.
        """
        self._loop_runner.run(self.engine.receive(handle, verify))

    def gpu_memory(self) -> dict[str, float]:
        """See `RolloutEngine.gpu_memory`."""
        return self._loop_runner.run(self.engine.gpu_memory())

    def sleep(self, level: int = 1) -> int:
        """Free the accelerator's memory until `wake`, as `RolloutEngine.sleep`; returns how many bytes. No episode may
        be in flight.
        """
        return self._loop_runner.run(self.engine.sleep(level))

    def wake(self, for_weights: bool = False) -> None:
        """Undo `sleep`, as `RolloutEngine.wake`."""
        self._loop_runner.run(self.engine.wake(for_weights))

    def close(self) -> None:
        """End the episodes that are still being run, what the agent has started, and the engine."""
        self._loop_runner.run(self._close())
        self.engine.close()
        self._loop_runner.close()

    async def _close(self) -> None:
        for group in self._groups.values():
            group.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)
        await self._executor.close()

    async def _run_group(self, prompts: Batch, sampling: SamplingConfig) -> None:
        episodes = await self._run_all(prompts, sampling, self._failures)
        self._finished.append((prompts, episodes))

    async def _run_all(self, prompts: Batch, sampling: SamplingConfig, failures: _Failures) -> list[list[Episode]]:
        """Run all; the first thing that ends the run ends them all."""
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._run_episode(task, failures)) for task in _tasks(prompts, sampling)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [episode.result() for episode in running]

    async def _run_episode(self, task: EpisodeTask, failures: _Failures) -> list[Episode]:
        policy = Policy(task, self.engine, self.encoder, self.options)
        async with self._slots:
            try:
                episodes = _checked(await self._executor.execute(task, policy))
            except Exception as error:  # noqa: BLE001 - an agent may raise anything, and ends its own episode alone
                episodes = [Episode(list(task.tokens), len(task.tokens))]
                episodes[0].fail(*described(error))
        if policy.broken is not None:
            raise policy.broken
        for branch, episode in enumerate(episodes):
            episode.branch = branch
            if not episode.turns and policy.max_tokens is not None:
                # Nothing is learnt from it; a trainer's model need not read more than it can.
                episode.cut(policy.max_tokens)
        failures.add(task, episodes[0])
        return episodes


def _tasks(prompts: Batch, sampling: SamplingConfig) -> Iterator[EpisodeTask]:
    texts = prompts.objects.get("prompt") or [""] * len(prompts)  # who responds without an agent reads tokens alone
    labels = prompts.objects.get("label") or [None] * len(prompts)
    ids = zip(prompts["prompt_id"].tolist(), prompts["sample_id"].tolist(), strict=True)
    others = prompts.objects.get("extra_info") or [None] * len(prompts)
    sources = prompts.objects.get("datasource") or [""] * len(prompts)
    rows = zip(prompts.lists("tokens"), texts, labels, ids, others, sources, strict=True)
    for tokens, text, label, (prompt_id, sample_id), other, source in rows:
        yield EpisodeTask(tokens, text, label, prompt_id, sample_id, sampling, other or {}, source)


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


def _checked(result: Any) -> list[Episode]:
    """What an executor returned, if it is what it should be."""
    episodes = list(result) if isinstance(result, list | tuple) else [result]
    if not episodes or not all(isinstance(episode, Episode) for episode in episodes):
        raise ValueError(
            f"execute returned {result!r:.80}; return an Episode, or a list of them with the main one first"
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
) -> EpisodeRunner:
    """A runner with an engine of its own.

    Args:
        model_path: folder or hub name of the policy.
        engine: its configuration.
        agent: the options of episodes; without an agent, responses are single turns.
        tokenizer: loads that of the policy.
    """
    executor = None
    if agent.func_path is not None:
        executor = load_agent(agent.func_path, agent.arguments)
    else:
        # Plain responses, as many at a time as the engine takes.
        agent = dataclasses.replace(agent, concurrency=max(agent.concurrency, engine.max_num_seqs))
    loop_runner = asyncio.Runner()
    opened = loop_runner.run(open_async_engine(model_path, engine))
    runner = EpisodeRunner(opened, executor, agent, tokenizer(), loop_runner)
    settle()
    return runner


def settle() -> None:
    """Take all that is loaded out of the garbage collector's sight, which would look at it again with each wave of
    episodes, and keep the engine waiting.
    """
    gc.collect()
    gc.freeze()
