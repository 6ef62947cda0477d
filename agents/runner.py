"""EpisodeRunner: the `Sampler` of rollout roles with an agent, or with asynchronous single-turn responses."""

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
from components.batch.grouping import group_by
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
"""Number of recent episodes over which the share of failed ones is computed, if episodes are not run in batches."""
_log = logging.getLogger(__name__)


class EpisodeRunner:
    """Runs episodes with one engine. Episodes make progress only during calls of the runner.

    The runner has its own asyncio loop, which runs in the calling thread. At most `options.concurrency` episodes run
    concurrently. They start in the order of submission.
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
            engine: the engine. The runner closes it.
            executor: executor of the episodes. None: single turns.
            options: options of the episodes.
            tokenizer: tokenizer of the policy.
            loop_runner: runner of the event loop in which the engine was opened.
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
        """Version of the engine's weights."""
        return self.engine.weight_version

    @property
    def has_weights(self) -> bool:
        """False after a sleep that has discarded the weights."""
        return self.engine.has_weights

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Run one episode for each prompt.

        Args:
            prompts: prompts in the format of `RolloutEngine.generate`. Agents read the objects `prompt` and `label`.
            sampling: sampling parameters of the turns. A turn has at most `max_new_tokens`, or the remaining space of
                the sequence.

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
        """Start groups of episodes, which make progress whenever the runner is called.

        Args:
            prompts: see `generate`. Prompts with the same `prompt_id` form a group, which `collect` returns as a whole.
            sampling: see `generate`.

        Raises:
            ValueError: a group with the same `prompt_id` is running.
        """
        for prompt_id, rows in group_by(prompts, "prompt_id").items():
            if prompt_id in self._groups:
                raise ValueError(f"prompt {prompt_id} is already running; collect it before starting it again")
            self._groups[prompt_id] = self._loop_runner.get_loop().create_task(self._run_group(rows, sampling))

    def collect(self, seconds: float) -> Collected:
        """Run episodes until a group has finished, for at most `seconds` seconds, and return the finished groups.

        Raises:
            RuntimeError: the engine failed, or more of the last WINDOW episodes failed than `options.max_failed_share`
                allows. With fewer episodes than that: all of them failed, and more than FEW_FAILURES.
        """
        if self._groups:
            waiting = asyncio.wait(self._groups.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self._loop_runner.run(waiting)
        for prompt_id, group in list(self._groups.items()):
            if group.done():
                del self._groups[prompt_id]
                group.result()
        finished = self._finished
        self._finished = []
        if not finished:
            return Collected(None, list(self._groups))
        prompts = Batch.concat([rows for rows, _ in finished])
        episodes = [sequences for _, group in finished for sequences in group]
        return Collected(as_batch(prompts, episodes, self.engine.weight_version), list(self._groups))

    def receive(self, handle: WeightHandle, verify: bool = False) -> None:
        """Load published weights. Running episodes continue with them. Raises the errors of the engine."""
        self._loop_runner.run(self.engine.receive(handle, verify))

    def check(self, probe: Any) -> dict[str, float]:
        """See `RolloutEngine.check`."""
        return self._loop_runner.run(self.engine.check(probe))

    def metrics(self) -> dict[str, float]:
        """See `RolloutEngine.metrics`."""
        return self._loop_runner.run(self.engine.metrics())

    def sleep(self, level: int = 1) -> int:
        """Free device memory until `wake`, and return the freed bytes; see `RolloutEngine.sleep`.

        No episode may be running.
        """
        return self._loop_runner.run(self.engine.sleep(level))

    def wake(self, for_weights: bool = False) -> None:
        """Undo `sleep`; see `RolloutEngine.wake`."""
        self._loop_runner.run(self.engine.wake(for_weights))

    def close(self) -> None:
        """Cancel running episodes, and close the executor and the engine."""
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
        """Run one episode per prompt. The first fatal error cancels all of them and is raised."""
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
            except Exception as error:  # noqa: BLE001 - an agent may raise anything, which ends only its own episode
                episodes = [Episode(list(task.tokens), len(task.tokens))]
                episodes[0].fail(*described(error))
        if policy.broken is not None:
            raise policy.broken
        for branch, episode in enumerate(episodes):
            episode.branch = branch
            if not episode.turns and policy.max_tokens is not None:
                # An episode without turns is not trained on, but a long one would exceed the trainer's limits.
                episode.cut(policy.max_tokens)
        failures.add(task, episodes[0])
        return episodes


def _tasks(prompts: Batch, sampling: SamplingConfig) -> Iterator[EpisodeTask]:
    texts = prompts.objects.get("prompt") or [""] * len(prompts)  # optional, because single turns read only tokens
    labels = prompts.objects.get("label") or [None] * len(prompts)
    ids = zip(prompts["prompt_id"].tolist(), prompts["sample_id"].tolist(), strict=True)
    others = prompts.objects.get("extra_info") or [None] * len(prompts)
    sources = prompts.objects.get("datasource") or [""] * len(prompts)
    rows = zip(prompts.lists("tokens"), texts, labels, ids, others, sources, strict=True)
    for tokens, text, label, (prompt_id, sample_id), other, source in rows:
        yield EpisodeTask(tokens, text, label, prompt_id, sample_id, sampling, other or {}, source)


class _Failures:
    """Counter of episodes that end as errors, which raises if there are too many."""

    def __init__(self, share: float, count: int | None = None) -> None:
        """
        Args:
            share: maximum share of episodes that may fail.
            count: total number of episodes. None: unlimited, and the share refers to the last WINDOW episodes.
        """
        self._share = share
        self._count = count
        self._failed: deque[bool] = deque(maxlen=count or WINDOW)
        self._first: Episode | None = None

    def add(self, task: EpisodeTask, episode: Episode) -> None:
        """Count one episode.

        Raises:
            RewardError: too many episodes have failed.
        """
        self._failed.append(episode.status == "error")
        if episode.status != "error":
            return
        if self._first is None:
            self._first = episode
            _log.warning(
                "the episode of sample %s of prompt %s ended as an error: %s\n%s",
                *(task.sample_id, task.prompt_id, episode.error, episode.trace),
            )
        failed = sum(self._failed)
        seen = len(self._failed)
        count = self._count or WINDOW
        # If all episodes so far have failed, the run stops before a window of them is wasted.
        if self._count is None and failed == seen > FEW_FAILURES:
            count = seen
        if failed > allowed_failures(count, self._share):
            error = RewardError(
                f"{failed} of {count} episodes ended as errors, more than agent.max_failed_share={self._share:g} "
                f"allows; the first: {self._first.error}"
            )
            if self._first.trace:
                error.add_note(self._first.trace)
            raise error


def _checked(result: Any) -> list[Episode]:
    """Return the episodes that an executor has returned, after checks. Raises ValueError if they are invalid."""
    episodes = list(result) if isinstance(result, list | tuple) else [result]
    if not episodes or not all(isinstance(episode, Episode) for episode in episodes):
        raise ValueError(
            f"execute returned {result!r:.80}; return an Episode, or a list of them with the main one first"
        )
    for episode in episodes:
        if not len(episode.tokens) == len(episode.logprobs) == len(episode.versions):
            raise ValueError("tokens, logprobs and versions of an Episode differ in length; use act() and observe()")
    return episodes


def open_runner(
    model_path: str,
    engine: RolloutConfig,
    agent: AgentOptions,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
) -> EpisodeRunner:
    """Open an engine, and return a runner that owns it.

    Args:
        model_path: folder or hub name of the policy.
        engine: configuration of the engine.
        agent: options of episodes. Without `func_path`, responses are single turns.
        tokenizer: function that loads the policy's tokenizer.
    """
    executor = None
    if agent.func_path is not None:
        executor = load_agent(agent.func_path, agent.arguments)
    else:
        # Single turns only wait for the engine, so a lower concurrency would leave it idle.
        agent = dataclasses.replace(agent, concurrency=max(agent.concurrency, engine.max_num_seqs))
    loop_runner = asyncio.Runner()
    opened = loop_runner.run(open_async_engine(model_path, engine))
    runner = EpisodeRunner(opened, executor, agent, tokenizer(), loop_runner)
    settle()
    return runner


def settle() -> None:
    """Exclude all existing objects from garbage collection.

    Each wave of episodes triggers a collection, which would scan these objects again while the engine waits.
    """
    gc.collect()
    gc.freeze()
