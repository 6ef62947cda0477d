"""Trial of an agent before a run: the first call of an episode, in a separate process that ends afterwards."""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from agents.episode import AgentExecutorBase
from agents.executor import MultiTurnAgentExecutor, SingleTurnAgentExecutor
from agents.loading import load_agent
from agents.schema import Observation, read_reset
from components.process.child_process import Child, described, run_child, serve_calls
from components.registry import load
from components.rewards.base import FUNCTIONS

FirstCall = Literal["reset", "reward", ""]
"""Method that can be called without a response of the policy, or "" if the executor has none."""
FAULTS_OF_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""System errors that are faults of the agent or the data. Other ones, such as a refused connection, may occur only on
this machine."""
LOAD_S = 60.0
"""Timeout for loading the agent's file in seconds."""


class UntriedError(Exception):
    """Raised if a trial has no result: the call exceeded its timeout, or may need resources that this machine lacks."""


Opening = tuple[Observation, Sequence[Mapping[str, Any]]]
"""Return value of `reset`: (observation, tools)."""


class AgentTrial:
    """An agent in a separate process."""

    def __init__(self, func_path: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Load the agent.

        Args:
            func_path: path of the agent file, or name of an environment.
            arguments: keyword arguments of the class that the file defines.

        Raises:
            ValueError: the agent cannot be loaded.
            UntriedError: loading takes longer than LOAD_S.
        """
        self._func_path = func_path
        self._arguments = dict(arguments or {})
        self._child = Child("agents.trial")
        self.first_call: FirstCall = self._load()

    def __enter__(self) -> AgentTrial:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._child.end()

    def try_row(self, prompt: str, row: Mapping[str, Any], limit_s: float) -> Opening | None:
        """Make the first call of an episode.

        Args:
            prompt: text of the prompt.
            row: row of the data with `label` and optionally `extra_info` and `datasource`.
            limit_s: timeout of the call in seconds.

        Returns:
            The return value of `reset`, or None for a reward function, which scores the label as the response.

        Raises:
            ValueError: the call fails, or its return value is invalid.
            UntriedError: the call exceeds its timeout, or ends with a system error.
        """
        if self._child.is_dead():  # the call for the previous row has ended the process
            self._child.end()
            self._child = Child("agents.trial")
            self._load()
        return self._request((prompt, dict(row)), limit_s, self.first_call)

    def _load(self) -> FirstCall:
        try:
            return self._request(
                {"path": sys.path, "func_path": self._func_path, "arguments": self._arguments}, LOAD_S, "loading it"
            )
        except BaseException:
            # `__exit__` is not called after an error in the constructor, so the child is ended here.
            self._child.kill()
            self._child.end()
            raise

    def _request(self, message: object, limit_s: float, action: str) -> Any:
        began = time.monotonic()
        status, *results = self._child.request(message, limit_s)
        if status == "ok":
            return results[0]
        reason, trace = results
        if status == "untried":
            raise UntriedError(reason)
        # `Child` reports a timeout like any other failure, so the elapsed time distinguishes the two.
        if time.monotonic() - began >= limit_s:
            raise UntriedError(f"{action} takes more than {limit_s:g} s")
        error = ValueError(reason)
        if trace:
            error.add_note(trace)
        raise error


# The functions below run in the process of the trial.


def _first_call(executor: AgentExecutorBase) -> FirstCall:
    """Return the first call of an executor's episodes, or "" for an executor with its own `execute`."""
    execute = type(executor).execute
    if isinstance(executor, MultiTurnAgentExecutor) and execute is MultiTurnAgentExecutor.execute:
        return "reset"
    if isinstance(executor, SingleTurnAgentExecutor) and execute is SingleTurnAgentExecutor.execute:
        if executor.reward is None:
            raise ValueError("its SingleTurnAgentExecutor has no reward; pass it a reward function")
        return "reward"
    return ""


async def _reset(instance: Callable[[], Any], prompt: str, row: Mapping[str, Any]) -> Any:
    states = {"observation": prompt, "label": row["label"], "extra_info": row.get("extra_info") or {}}
    result = instance().reset(states)
    if inspect.isawaitable(result):
        return await result
    return result


def _score(reward: Any, prompt: str, row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Score the label as the response. Return None, or the reason and the traceback of a failure."""
    label = str(row["label"])
    columns = {"columns": row.get("extra_info") or {}, "completion_ids": [0], "step": 0}
    columns["data_source"] = row.get("datasource", "")
    by_names = load(FUNCTIONS, "by names", "the reward of an executor")
    output = by_names(reward)([prompt + label], [prompt], [row["label"]], [label], [columns])
    return output.failures.get(0)


def _try(executor: AgentExecutorBase, runner: asyncio.Runner, prompt: str, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Make the first call. Return ("ok", opening), or "failed" or "untried" with an error and its traceback."""
    try:
        if isinstance(executor, MultiTurnAgentExecutor):
            result = runner.run(_reset(executor.agent_instance, prompt, row))
        else:
            assert isinstance(executor, SingleTurnAgentExecutor)
            failure = _score(executor.reward, prompt, row)
            if failure is None:
                return "ok", None
            return "failed", f"the reward raised {failure[0]}", failure[1]
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, including SystemExit
        method = "reset" if isinstance(executor, MultiTurnAgentExecutor) else "the reward"
        reason, trace = described(error)
        # Other system errors may not occur on the machines of the run, so the agent is not rejected for them.
        if isinstance(error, OSError) and not isinstance(error, FAULTS_OF_FILES):
            return "untried", f"{method} raised {reason}", trace
        return "failed", f"{method} raised {reason}", trace
    try:
        return "ok", read_reset(result)
    except ValueError as error:
        return "failed", str(error), ""


def _serve(channel: socket.socket) -> None:
    executors = list[AgentExecutorBase]()

    def reply(message: Any) -> tuple[Any, ...]:
        if executors:
            return _try(executors[0], runner, *message)
        try:
            sys.path[:] = list(dict.fromkeys([*message["path"], *sys.path]))
            executors.append(load_agent(message["func_path"], message["arguments"]))
            return "ok", _first_call(executors[0])
        except ValueError as error:
            return "failed", str(error), "".join(getattr(error, "__notes__", ()))

    with asyncio.Runner() as runner:
        serve_calls(channel, reply)


if __name__ == "__main__":
    run_child(_serve)
