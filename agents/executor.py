"""Executors of episodes: one turn, or many turns with an environment. This module does not import torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from agents.environment_pool import Environment, EnvironmentFailure, EnvironmentPool
from agents.episode import AgentExecutorBase, Episode, EpisodeTask, Policy, Status
from agents.options import AgentOptions
from agents.rendering import feedback_tokens, first_tokens, refuse_mixed
from agents.schema import read_reset, read_sampling, read_step, sampling_params
from agents.user_code import Overdue, in_thread, in_time
from components.registry import load
from components.rewards.base import FUNCTIONS

STATUS: dict[str, Status] = {"stop": "finished", "length": "truncated", "abort": "aborted"}
"""Finish reason of a turn -> status of an episode that ends with the turn."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Executor that alternates between the policy and an environment until the environment returns done=True."""

    pool: EnvironmentPool

    def __init__(self, agent_instance: Callable[[], Any]) -> None:
        """
        Args:
            agent_instance: class of the environments (an `AgentInstanceBase`, or a class with the same two methods), or
                a `partial` of it.
        """
        self.agent_instance = agent_instance

    def open(self, options: AgentOptions) -> None:
        """Create the pool of environments."""
        self.pool = EnvironmentPool(self.agent_instance, options)
        self._is_rewarded = options.rewarded_by == "environment"

    async def close(self) -> None:
        """Close the pool of environments."""
        self.pool.close()

    async def execute(self, task: EpisodeTask, policy: Policy) -> Episode:
        """Run one episode.

        Feedback after the last turn is not part of the episode, because the policy generates nothing from it. An
        episode that fails keeps its earlier tokens.
        """
        episode = Episode(list(task.tokens), len(task.tokens), is_rewarded=self._is_rewarded)
        environment = self.pool.open()
        try:
            row = {"label": task.label, "extra_info": task.extra_info}
            # Copied, because an environment may change what it receives, and all samples of a prompt share the row.
            states = {"observation": task.prompt, **copy.deepcopy(row)}
            observation, tools = read_reset(await environment.call("reset", states))
            if observation != task.prompt:
                tokens = first_tokens(policy.encoder, observation, task.prompt, tools)
                episode = Episode(tokens, len(tokens), is_rewarded=self._is_rewarded)
            episode.status = await self._run_turns(episode, environment, task, policy)
        except EnvironmentFailure as error:
            episode.fail(str(error), error.trace)
        except ValueError as error:
            episode.fail(str(error))
        finally:
            await environment.close()
        return episode

    async def _run_turns(self, episode: Episode, environment: Environment, task: EpisodeTask, policy: Policy) -> Status:
        """Run all turns after the first observation, and return the status of the episode."""
        sampling = task.sampling
        stop: list[str] = []
        feedback: list[int] = []
        for number in range(policy.max_turns):
            # Feedback is appended whole or not at all, because the policy would learn nothing from half a sentence. An
            # episode without space for its first turn is an error instead: `draw` raises.
            if number and not policy.has_space(len(episode.tokens) + len(feedback)):
                break
            episode.observe(feedback)
            observation_text = policy.decode(episode.tokens)
            turn = episode.act(*await policy.draw(episode.tokens, sampling, stop))
            if turn.finish == "abort":
                return "aborted"
            states = {
                "observation_text": observation_text,
                "action_text": policy.decode(episode.tokens[turn.start : turn.end], skip_special_tokens=True),
                "finish": turn.finish,
                "label": copy.deepcopy(task.label),
                "sampling_params": sampling_params(sampling, [*policy.stop, *stop]),
            }
            result = read_step(await environment.call("step", states), f"step {number}")
            turn.reward = result.reward
            episode.reward += result.reward
            episode.score = episode.reward if result.score is None else result.score
            episode.logs = result.logs
            if result.done:
                return "finished"
            # Sampling parameters of a step hold for the next turn only.
            sampling = task.sampling
            stop = []
            if result.sampling_params is not None:
                sampling, stop = read_sampling(result.sampling_params, task.sampling)
            feedback = feedback_tokens(policy.encoder, result.feedback, episode.tokens)
            refuse_mixed(policy.encoder, episode.tokens[: episode.prompt_length], result.feedback, feedback)
        return "truncated"


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Executor of single responses, scored by a reward function. Recipes reject an agent without such a function."""

    def __init__(self, reward: Callable[..., Any] | None = None) -> None:
        """
        Args:
            reward: reward function with the signature of a reward file's function (see `by_names`). It is called in a
                thread with lists of one item.
        """
        self.reward = reward
        self._limit_s = AgentOptions.step_timeout_s

    def open(self, options: AgentOptions) -> None:
        """Set the timeout of the reward function."""
        self._limit_s = options.step_timeout_s

    async def execute(self, task: EpisodeTask, policy: Policy) -> Episode:
        """Generate one response, if the sequence has space for one, and score it."""
        tokens = list(task.tokens)
        episode = Episode(tokens, len(tokens), status="truncated", is_rewarded=self.reward is not None)
        # Without space for a token, `draw` would raise an error and the episode would count as failed.
        if self.reward is None and not policy.has_space(len(tokens)):
            return episode
        turn = episode.act(*await policy.draw(tokens, task.sampling))
        episode.status = STATUS[turn.finish]
        if self.reward is None or turn.finish == "abort":
            return episode
        query = policy.decode(episode.tokens)
        ids = episode.tokens[turn.start :]
        row = {"columns": copy.deepcopy(task.extra_info), "completion_ids": ids, "data_source": task.data_source}
        row["step"] = max(task.sampling.step - 1, 0)  # number of finished steps, as in recipes without an agent
        texts = [policy.decode(ids, skip_special_tokens=True)]
        by_names = load(FUNCTIONS, "by names", "the reward of an executor")
        score = partial(by_names(self.reward), [query], [task.prompt], [copy.deepcopy(task.label)], texts, [row])
        try:
            columns = await in_time(in_thread(score), self._limit_s)
        except Overdue:
            raise TimeoutError(f"the reward did not return within {self._limit_s:g} s (agent.step_timeout_s)") from None
        if columns.failures or columns.absent:
            reason, trace = columns.failures.get(0, ("it returned None", ""))
            episode.fail(f"the reward: {reason}", trace)
            return episode
        turn.reward = episode.reward = columns.rewards[0]
        episode.score = columns.scores[0]
        episode.logs = {name: values[0] for name, values in columns.logs.items()}
        return episode
