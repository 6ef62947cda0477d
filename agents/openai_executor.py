"""Executor of agents that are clients of OpenAI's API. They are trained without changes.

    class AgentExecutor(OpenAIAgentExecutor):
        async def run_agent(self, prompt, label, *, base_url, api_key, session_id):
            client = AsyncOpenAI(base_url=base_url, api_key=api_key)
            ...
            return {"reward": 1.0}

For a program in any language set `command = ["bash", "agent.sh"]` instead. `agents.openai_server` describes how
requests become episodes. It needs starlette and uvicorn: `bash scripts/setup.sh endpoint`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.environment_pool import EnvironmentFailure, EnvironmentPool
from agents.episode import AgentExecutorBase, Episode, EpisodeTask, Policy
from agents.openai_server import Server
from agents.schema import StepResult, read_step
from components.net.direct import direct_loopback
from components.process.child_process import exit_reason
from components.process.programs import run_program

if TYPE_CHECKING:
    from agents.options import AgentOptions

START = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Python code that starts a program which the kernel kills when its parent process dies."""


class OpenAIAgentExecutor(AgentExecutorBase):
    """Executor of an agent that is a client of OpenAI's API.

    The timeout of an episode is `agent.step_timeout_s` times `agent.max_turns` seconds.
    """

    command: Sequence[str] = ()
    """Program to run instead of `run_agent`, in the folder of the agent's file. Its environment has OPENAI_BASE_URL,
    OPENAI_API_KEY, PROMPT, LABEL (text, or JSON) and EXTRA_INFO (the other columns of the row, as JSON). The last line
    of its output must be the return value of `run_agent` as JSON. Its child processes are killed when it ends."""
    _server: Server | None = None
    _takes_columns = False
    _direct: ExitStack | None = None

    async def run_agent(
        self,
        prompt: str,
        label: Any,
        *,
        base_url: str,
        api_key: str,
        session_id: str,  # noqa: ARG002 - for overrides
        extra_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run one episode in a thread with its own event loop. The default implementation runs `command`.

        An override may be a sync or an async function.

        Args:
            prompt: text of the prompt. Set `data.apply_chat_template=false`, because the endpoint renders messages.
            label: label of the row.
            base_url: base URL of the API.
            api_key: API key of the episode. All generations with this key are trained on.
            session_id: id of the episode, for logs.
            extra_info: other columns of the row. An override receives them only if it has this parameter.

        Returns:
            `{"reward": number}` of the whole episode. Optional keys: `score` (from 0 to 1; default: the reward) and
            `extra_logs` (name -> number).

        Raises:
            ValueError: the command fails, or its last line is not JSON.
        """
        if not self.command:
            raise NotImplementedError("override run_agent, or set command")
        environment = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "PROMPT": prompt}
        environment["LABEL"] = label if isinstance(label, str) else json.dumps(label, default=str)
        environment["EXTRA_INFO"] = json.dumps(extra_info or {}, default=str)
        # A file instead of a pipe, because processes that the program leaves behind may keep a pipe open.
        with tempfile.TemporaryFile() as out:
            code = await run_program(
                [sys.executable, "-ISc", START, str(os.getpid()), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                cwd=Path(inspect.getfile(type(self))).parent,
                env=os.environ | environment,
            )
            out.seek(0)
            last_line = out.read().decode(errors="replace").strip().rpartition("\n")[2]
        if code:
            raise ValueError(f"{self.command} ended with {exit_reason(code)}; its last line: {last_line!r:.200}")
        try:
            return json.loads(last_line)
        except ValueError:
            raise ValueError(f"{self.command} printed {last_line!r:.200} as its last line; print JSON there") from None

    def open(self, options: AgentOptions) -> None:
        """Prepare for episodes: create the pool of threads, and exclude the loopback address from proxies."""
        limit_s = options.step_timeout_s * options.max_turns
        parameters = inspect.signature(self.run_agent).parameters.values()
        self._takes_columns = any(p.name == "extra_info" or p.kind is p.VAR_KEYWORD for p in parameters)
        # The endpoint listens on the loopback address, and the agent's client reads this process's proxy variables.
        self._direct = ExitStack()
        self._direct.enter_context(direct_loopback())
        client = type("Client", (), {"run_agent": lambda _, states: self.run_agent(**states)})
        # In threads, because a client that blocks the server's event loop would wait for its own response.
        self._pool = EnvironmentPool(client, dataclasses.replace(options, runs_in="thread", step_timeout_s=limit_s))

    async def close(self) -> None:
        """Stop the server."""
        if self._direct is not None:
            self._direct.close()
        if self._server is not None:
            await self._server.close()

    async def execute(self, task: EpisodeTask, policy: Policy) -> list[Episode]:
        """Run one episode. If the agent fails at a limit of tokens or turns, it is truncated with a reward of 0."""
        self._server = self._server or Server()
        result = StepResult(0.0, 0.0, "", True, {})
        failure = None
        with self._server.session(task, policy) as session:
            states = {"prompt": task.prompt, "label": copy.deepcopy(task.label), "base_url": self._server.base_url}
            states |= {"api_key": session.api_key, "session_id": session.id}
            if self._takes_columns:
                states["extra_info"] = copy.deepcopy(dict(task.extra_info))
            environment = self._pool.open()
            try:
                result = _read(await environment.call("run_agent", states))
            except (EnvironmentFailure, ValueError) as error:
                failure = error
            finally:
                await environment.close()
        episodes = session.episodes() or [Episode(list(task.tokens), len(task.tokens))]
        # After a refused request most agents raise an error. It is a consequence of the limit and not a failure.
        is_cut = bool(session.limit and episodes[0].turns)
        if not episodes[0].turns and (session.limit or not failure):
            failure = ValueError(session.limit or "the agent has sent no request to its base_url before it ended")
        if session.is_aborted or any(turn.finish == "abort" for turn in episodes[0].turns):
            status = "aborted"
        else:
            status = "finished"
        if is_cut:
            status = "truncated"
        for episode in episodes:
            if failure and not is_cut:
                episode.fail(str(failure), getattr(failure, "trace", ""))
                continue
            episode.status = status
            episode.reward = result.reward
            episode.logs = result.logs
            episode.score = result.reward if result.score is None else result.score
            # The reward is known only at the end of the episode, so it belongs to the last turn.
            for turn in episode.turns[-1:]:
                turn.reward = result.reward
        return episodes


def _read(result: Any) -> StepResult:
    """Check the return value of an agent, and convert it to a StepResult. Raises ValueError if it is invalid."""
    if not isinstance(result, Mapping):
        raise ValueError(f'the agent returned {result!r:.200}; return {{"reward": number}}')
    rewards = {f"{name}s": result.get(name, result.get(f"{name}s")) for name in ("reward", "score")}
    step = {"environment_feedback": "", "done": True, "extra_logs": result.get("extra_logs"), **rewards}
    return read_step(step, "run_agent")
