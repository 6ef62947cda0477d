"""Agents that talk to the policy as to OpenAI's API, trained as they are.

    class AgentExecutor(OpenAIAgentExecutor):
        async def run_agent(self, prompt, label, *, base_url, api_key, session_id):
            client = AsyncOpenAI(base_url=base_url, api_key=api_key)
            ...
            return {"reward": 1.0}

or, for a program in any language, `command = ["bash", "agent.sh"]`. `agents.openai_server` says what its requests
become; it needs starlette and uvicorn: `bash scripts/setup.sh endpoint`.
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
from components.net.loopback import direct_loopback
from components.process.child_process import exit_reason, run_program

if TYPE_CHECKING:
    from agents.options import AgentOptions

START = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Has the kernel end a program with the process that started it."""


class OpenAIAgentExecutor(AgentExecutorBase):
    """Runs an agent that is a client. An episode has `agent.step_timeout_s` times `agent.max_turns` seconds."""

    command: Sequence[str] = ()
    """A program to run in place of `run_agent`, in the folder of the agent's file. It finds OPENAI_BASE_URL,
    OPENAI_API_KEY, PROMPT, LABEL (text, or JSON) and EXTRA_INFO (the data's other columns, JSON) in its environment.
    The last line that it prints is what `run_agent` would return, as JSON. What it has started ends with it."""
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
        session_id: str,  # noqa: ARG002 - for those who write their own
        extra_info: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run one episode, in a thread with an event loop of its own; a plain function may take its place.

        As it is here it runs `command`.

        Args:
            prompt: its text. Set `data.apply_chat_template=false`: the endpoint writes messages out.
            label: of the data.
            base_url: of the API.
            api_key: of the episode; what is drawn with it is what is trained on.
            session_id: another name of the episode, for logs.
            extra_info: the data's other columns. A function of your own gets them if it has this parameter.

        Returns:
            `{"reward": number}` of the whole episode; also `score` (from 0 to 1; default: the reward) and `extra_logs`
            (names and numbers), if you like.
        """
        if not self.command:
            raise NotImplementedError("write run_agent, or set command")
        environment = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "PROMPT": prompt}
        environment["LABEL"] = label if isinstance(label, str) else json.dumps(label, default=str)
        environment["EXTRA_INFO"] = json.dumps(extra_info or {}, default=str)
        # A file, and no pipe: what the program leaves behind may hold that open.
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
        """Prepare for episodes."""
        limit_s = options.step_timeout_s * options.max_turns
        parameters = inspect.signature(self.run_agent).parameters.values()
        self._takes_columns = any(p.name == "extra_info" or p.kind is p.VAR_KEYWORD for p in parameters)
        # The endpoint is on the loopback, and the agent's client reads the environment of this process.
        self._direct = ExitStack()
        self._direct.enter_context(direct_loopback())
        client = type("Client", (), {"run_agent": lambda _, states: self.run_agent(**states)})
        # In threads: a client that blocks where the server runs would wait for itself.
        self._pool = EnvironmentPool(client, dataclasses.replace(options, runs_in="thread", step_timeout_s=limit_s))

    async def close(self) -> None:
        """End the server."""
        if self._direct is not None:
            self._direct.close()
        if self._server is not None:
            await self._server.close()

    async def execute(self, task: EpisodeTask, policy: Policy) -> list[Episode]:
        """Run one episode. An agent that gives up at a limit of tokens or turns is truncated, and earns nothing."""
        self._server = self._server or Server()
        result, failure = StepResult(0.0, 0.0, "", True, {}), None
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
        is_cut = bool(session.limit and episodes[0].turns)
        if not episodes[0].turns and (session.limit or not failure):
            failure = ValueError(session.limit or "the agent ended without a response of the policy; use its base_url")
        is_aborted = session.is_aborted or any(turn.finish == "abort" for turn in episodes[0].turns)
        for episode in episodes:
            if failure and not is_cut:
                episode.fail(str(failure), getattr(failure, "trace", ""))
                continue
            episode.status = "truncated" if is_cut else "aborted" if is_aborted else "finished"
            episode.reward, episode.logs = result.reward, result.logs
            episode.score = result.reward if result.score is None else result.score
            for turn in episode.turns[-1:]:
                turn.reward = result.reward
        return episodes


def _read(result: Any) -> StepResult:
    """Read what an agent returned; ValueError names what is wrong with it."""
    if not isinstance(result, Mapping):
        raise ValueError(f'the agent returned {result!r:.200}; return {{"reward": number}}')
    rewards = {f"{name}s": result.get(name, result.get(f"{name}s")) for name in ("reward", "score")}
    step = {"environment_feedback": "", "done": True, "extra_logs": result.get("extra_logs"), **rewards}
    return read_step(step, "run_agent")
