"""An agent in a process of its own, so that one which hangs or dies costs one test."""

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
    """Has one target play episodes, and fails the test that asked for them when it cannot."""

    def __init__(self, target: Target, samples: list[Sample], deadline_s: float, max_turns: int) -> None:
        """A `reset` or `step` may take `deadline_s`; an episode is left after `max_turns`."""
        self.target = target
        self.samples = samples
        self.max_turns = max_turns
        self._deadline_s = deadline_s
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._given_up = ""

    def play_first(self) -> Played:
        """Play one episode; an agent that cannot is asked for nothing more."""
        self._given_up = self._given_up or "one episode could not be played"
        played = self._begin_waiting("alone", self.samples[:1], "one episode")
        self._given_up = ""
        return played

    def run_episodes(self, how: str, samples: Sequence[Sample], what: str) -> Played:
        """Play the samples; `how` is a method of Player, `what` says for the message what they are."""
        if self._given_up:
            self.fail(f"not asked for {what}: {self._given_up}")
        return self._begin_waiting(how, samples, what)

    def _begin_waiting(self, how: str, samples: Sequence[Sample], what: str) -> Played:
        connection = self._connection or self._start()
        under_way: list[str] = []
        try:
            connection.send((how, list(samples)))
        except (BrokenPipeError, ConnectionResetError):
            self.fail(f"asked for {what}: its process had ended with exit code {self._ended()} after the one before")
        while True:
            if not connection.poll(self._deadline_s):
                self.close()
                call = ", ".join(dict.fromkeys(under_way)) or "an episode"
                self._given_up = f"{call} did not return"
                self.fail(
                    f"asked for {what}: {call} did not return within {self._deadline_s:g} s; return sooner, or allow "
                    "more with --deadline"
                )
            try:
                kind, value = connection.recv()
            except EOFError:
                code = self._ended()
                self.fail(f"asked for {what}: its process ended with exit code {code} in {', '.join(under_way)}")
            if kind == "begin":
                under_way.append(value)
            elif kind == "end":
                under_way.remove(value)
            elif kind == "played":
                return value
            else:
                self.fail(f"asked for {what}: {value}")

    def fail(self, message: str) -> NoReturn:
        """Fail the test with a message about the target, and no stack of ours."""
        pytest.fail(f"{self.target.spec}, {message.rstrip()}", pytrace=False)

    def close(self) -> None:
        """End the process, busy or not."""
        if self._process is not None:
            self._process.kill()
            self._ended()

    def _start(self) -> Connection:
        # Not a fork: of a process with threads it may hang before the agent is reached.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, self.target.address, self.max_turns)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        why = f"nothing came within {LOAD_TIMEOUT_S:g} s"
        try:
            if self._connection.poll(LOAD_TIMEOUT_S):
                kind, why = self._connection.recv()
                if kind == "ready":
                    return self._connection
        except EOFError:
            why = f"it ended with exit code {self._ended()}"
        self.close()
        self._given_up = "it cannot be loaded in a process of its own"
        return self.fail(f"{self._given_up}: {why}")

    def _ended(self) -> int | None:
        """Forget a process that is at its end; return its exit code."""
        assert self._process is not None and self._connection is not None
        self._process.join()
        code = self._process.exitcode
        self._connection.close()
        self._process = self._connection = None
        return code
