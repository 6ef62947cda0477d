"""An agent in a separate process, so that an agent that hangs or dies fails only one test."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import NoReturn

import pytest

from tests.contracts.episodes import Played, serve
from tests.contracts.samples import Sample
from tests.contracts.targets import Target

LOAD_TIMEOUT_S = 600.0
"""Seconds for importing the agent's module, which may load a model."""


class AgentTrial:
    """Runs episodes of one target, and fails the calling test if that is not possible."""

    def __init__(self, target: Target, samples: list[Sample], deadline_s: float, max_turns: int) -> None:
        """
        Args:
            target: the agent.
            samples: rows of the episodes.
            deadline_s: timeout of one `reset` or `step` in seconds.
            max_turns: maximum number of turns of an episode.
        """
        self.target = target
        self.samples = samples
        self.max_turns = max_turns
        self._deadline_s = deadline_s
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._given_up = ""

    def play_first(self) -> Played:
        """Run one episode. After a failure all further requests fail immediately."""
        self._given_up = self._given_up or "one episode could not be played"
        played = self._begin_waiting("alone", self.samples[:1], "one episode")
        self._given_up = ""
        return played

    def run_episodes(self, method: str, samples: Sequence[Sample], description: str) -> Played:
        """Run episodes of the samples by a method of EpisodeRunner. `description` is for messages."""
        if self._given_up:
            self.fail(f"not asked for {description}: {self._given_up}")
        return self._begin_waiting(method, samples, description)

    def _begin_waiting(self, method: str, samples: Sequence[Sample], description: str) -> Played:
        connection = self._connection or self._start()
        running: list[str] = []
        try:
            connection.send((method, list(samples)))
        except (BrokenPipeError, ConnectionResetError):
            code = self._ended()
            self.fail(f"asked for {description}: its process ended with exit code {code} after the request before")
        while True:
            if not connection.poll(self._deadline_s):
                self.close()
                call = ", ".join(dict.fromkeys(running)) or "an episode"
                self._given_up = f"{call} did not return"
                limit = f"within {self._deadline_s:g} s; return sooner, or allow more with --deadline"
                self.fail(f"asked for {description}: {call} did not return {limit}")
            try:
                kind, value = connection.recv()
            except EOFError:
                code = self._ended()
                calls = ", ".join(running)
                self.fail(f"asked for {description}: its process ended with exit code {code} in {calls}")
            if kind == "begin":
                running.append(value)
            elif kind == "end":
                running.remove(value)
            elif kind == "played":
                return value
            else:
                self.fail(f"asked for {description}: {value}")

    def fail(self, message: str) -> NoReturn:
        """Fail the test with a message about the target, without the stack of the contracts."""
        pytest.fail(f"{self.target.spec}, {message.rstrip()}", pytrace=False)

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._ended()

    def _start(self) -> Connection:
        # Spawned, because the fork of a process with threads may hang.
        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe()
        arguments = (child_connection, self.target.address, self.max_turns)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        child_connection.close()
        reason = f"nothing came within {LOAD_TIMEOUT_S:g} s"
        try:
            if self._connection.poll(LOAD_TIMEOUT_S):
                kind, reason = self._connection.recv()
                if kind == "ready":
                    return self._connection
        except EOFError:
            reason = f"it ended with exit code {self._ended()}"
        self.close()
        self._given_up = "it cannot be loaded in a separate process"
        return self.fail(f"{self._given_up}: {reason}")

    def _ended(self) -> int | None:
        """Wait for the end of the process, close its connection, and return its exit code."""
        assert self._process is not None and self._connection is not None
        self._process.join()
        code = self._process.exitcode
        self._connection.close()
        self._process = self._connection = None
        return code
