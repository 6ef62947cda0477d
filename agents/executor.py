"""How episodes are run: one turn, or many with an environment. Nothing here needs torch."""

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
from components.rewards.functions import by_names

STATUS: dict[str, Status] = {"stop": "finished", "length": "truncated", "abort": "aborted"}
"""Of an episode that ends with its turn, by why that ended."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """The policy and an environment work one after the other until the environment is done with it."""

    pool: EnvironmentPool

    def __init__(self, agent_instance: Callable[[], Any]) -> None:
        """
        Args:
            agent_instance: class of the environments, an `AgentInstanceBase` or one with the same two methods; or a
                `partial` of it.
        """
        self.agent_instance = agent_instance

    def open(self, options: AgentOptions) -> None:
        """Prepare for environments that run where `options` say."""
        self.pool = EnvironmentPool(self.agent_instance, options)
        self._is_rewarded = options.rewarded_by == "environment"

    async def close(self) -> None:
        """End what the environments share."""
        self.pool.close()

    async def execute(self, task: EpisodeTask, policy: Policy) -> Episode:
        """Run one episode.

        Tokens of an environment after the last turn are not in it: nothing was drawn from them. One that fails
        keeps what came before.
        """
        episode = Episode(list(task.tokens), len(task.tokens), is_rewarded=self._is_rewarded)
        environment = self.pool.open()
        try:
            given = {"label": task.label, "extra_info": task.extra_info}
            states = {"observation": task.prompt, **copy.deepcopy(given)}
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
        """Run from the first observation on; returns how it ended."""
        sampling, stop, feedback = task.sampling, [], []
        for number in range(policy.max_turns):
            # Whole, or not at all: half a sentence of the environment's would teach nothing. An episode that cannot
            # begin is an error instead, as `draw` raises.
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
            sampling, stop = task.sampling, []
            if result.sampling_params is not None:
                sampling, stop = read_sampling(result.sampling_params, task.sampling)
            feedback = feedback_tokens(policy.encoder, result.feedback, episode.tokens)
            refuse_mixed(policy.encoder, episode.tokens[: episode.prompt_length], result.feedback, feedback)
        return "truncated"


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One response, rewarded by a function given here. Recipes refuse an agent that was given none."""

    def __init__(self, reward: Callable[..., Any] | None = None) -> None:
        """
        Args:
            reward: called in a thread as a reward file's function is (see `by_names`), with lists of one.
        """
        self.reward = reward
        self._limit_s = AgentOptions.step_timeout_s

    def open(self, options: AgentOptions) -> None:
        """Take over how long a reward may take."""
        self._limit_s = options.step_timeout_s

    async def execute(self, task: EpisodeTask, policy: Policy) -> Episode:
        """Draw one response, if there are tokens left for one."""
        tokens = list(task.tokens)
        episode = Episode(tokens, len(tokens), status="truncated", is_rewarded=self.reward is not None)
        if self.reward is None and not policy.has_space(len(tokens)):
            return episode
        turn = episode.act(*await policy.draw(tokens, task.sampling))
        episode.status = STATUS[turn.finish]
        if self.reward is None or turn.finish == "abort":
            return episode
        query = policy.decode(episode.tokens)
        ids = episode.tokens[turn.start :]
        row = {"columns": copy.deepcopy(task.extra_info), "completion_ids": ids, "data_source": task.data_source}
        row["step"] = max(task.sampling.step - 1, 0)  # finished steps, as in the recipes without an agent
        texts = [policy.decode(ids, skip_special_tokens=True)]
        ask = partial(by_names(self.reward), [query], [task.prompt], [copy.deepcopy(task.label)], texts, [row])
        try:
            columns = await in_time(in_thread(ask), self._limit_s)
        except Overdue:
            raise TimeoutError(f"the reward gave no response in {self._limit_s:g} s (agent.step_timeout_s)") from None
        if columns.failures or columns.absent:
            reason, trace = columns.failures.get(0, ("it returned None", ""))
            episode.fail(f"the reward: {reason}", trace)
            return episode
        turn.reward = episode.reward = columns.rewards[0]
        episode.score = columns.scores[0]
        episode.logs = {name: values[0] for name, values in columns.logs.items()}
        return episode
