"""Trial of an agent before a run starts: the first call that an episode makes, in a process that ends afterwards."""

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
from components.rewards.functions import by_names

FirstCall = Literal["reset", "reward", ""]
"""Method that an episode calls before, or without, the policy's response; "" where there is none."""
FAULTS_OF_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors of the system that are faults of the agent or of the data. Others, such as a refused connection, may be of
this machine alone."""
LOAD_S = 60.0
"""Seconds that the agent's file may take to load."""


class UntriedError(Exception):
    """The trial has no result: the call took too long, or needs what this machine may lack."""


Opening = tuple[Observation, Sequence[Mapping[str, Any]]]
"""What `reset` returned: an observation, and the tools."""


class AgentTrial:
    """An agent in a process of its own."""

    def __init__(self, func_path: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Load the agent.

        Args:
            func_path: file or name of the agent.
            arguments: keyword arguments of what the file defines.

        Raises:
            ValueError: it cannot be loaded.
            UntriedError: it takes longer than LOAD_S.
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
            row: of the data, with `label` and maybe `extra_info` and `datasource`.
            limit_s: seconds that the call may take.

        Returns:
            What `reset` returned; None of a reward, which scores the label as the response.

        Raises:
            ValueError: the call fails, or returns what no episode can begin with.
            UntriedError: it takes longer, or an error of the system ended it.
        """
        if self._child.is_dead():  # the row before ended it
            self._child.end()
            self._child = Child("agents.trial")
            self._load()
        return self._ask((prompt, dict(row)), limit_s, self.first_call)

    def _load(self) -> FirstCall:
        try:
            return self._ask(
                {"path": sys.path, "func_path": self._func_path, "arguments": self._arguments}, LOAD_S, "loading it"
            )
        except BaseException:
            self._child.kill()
            self._child.end()
            raise

    def _ask(self, message: object, limit_s: float, what: str) -> Any:
        began = time.monotonic()
        status, *results = self._child.request(message, limit_s)
        if status == "ok":
            return results[0]
        reason, trace = results
        if status == "untried":
            raise UntriedError(reason)
        if time.monotonic() - began >= limit_s:
            raise UntriedError(f"{what} takes more than {limit_s:g} s")
        error = ValueError(reason)
        if trace:
            error.add_note(trace)
        raise error


# What follows runs in the process of the trial.


def _first_call(executor: AgentExecutorBase) -> FirstCall:
    """Return what episodes of an executor call first; one with an `execute` of its own is not known."""
    execute = type(executor).execute
    if isinstance(executor, MultiTurnAgentExecutor) and execute is MultiTurnAgentExecutor.execute:
        return "reset"
    if isinstance(executor, SingleTurnAgentExecutor) and execute is SingleTurnAgentExecutor.execute:
        if executor.reward is None:
            raise ValueError("its SingleTurnAgentExecutor has no reward; give it a function")
        return "reward"
    return ""


async def _reset(instance: Callable[[], Any], prompt: str, row: Mapping[str, Any]) -> Any:
    states = {"observation": prompt, "label": row["label"], "extra_info": row.get("extra_info") or {}}
    result = instance().reset(states)
    return await result if inspect.isawaitable(result) else result


def _score(reward: Any, prompt: str, row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Score the label as the response; return the reason and the traceback where this fails."""
    label = str(row["label"])
    columns = {"columns": row.get("extra_info") or {}, "completion_ids": [0], "step": 0}
    columns["data_source"] = row.get("datasource", "")
    output = by_names(reward)([prompt + label], [prompt], [row["label"]], [label], [columns])
    return output.failures.get(0)


def _try(executor: AgentExecutorBase, runner: asyncio.Runner, prompt: str, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Make the first call; return "ok" and the opening, or "failed" or "untried", a line and a traceback."""
    try:
        if isinstance(executor, MultiTurnAgentExecutor):
            result = runner.run(_reset(executor.agent_instance, prompt, row))
        else:
            assert isinstance(executor, SingleTurnAgentExecutor)
            failure = _score(executor.reward, prompt, row)
            return ("ok", None) if failure is None else ("failed", f"the reward raised {failure[0]}", failure[1])
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit included
        method = "reset" if isinstance(executor, MultiTurnAgentExecutor) else "the reward"
        is_of_machine = isinstance(error, OSError) and not isinstance(error, FAULTS_OF_FILES)
        line, trace = described(error)
        return "untried" if is_of_machine else "failed", f"{method} raised {line}", trace
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
