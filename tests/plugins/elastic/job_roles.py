"""Roles of a job whose trainer adds engines and loses them. The engines have no model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from core import BaseTrainer, BaseWorkload, trainer_invocation
from plugins.elastic.options import ElasticOptions
from plugins.elastic.requests import read_state, resize

WITHIN_S = 60.0


@dataclass
class Placement:
    """Placement options of the job."""

    nodes: int = 1


@dataclass
class Settings:
    """Configuration of the job."""

    run_dir: Path
    elastic: ElasticOptions = field(default_factory=ElasticOptions)
    placement: Placement = field(default_factory=Placement)

    @property
    def fails(self) -> Path:
        """File during whose presence an engine cannot load its model."""
        return self.run_dir / "fails"

    @property
    def loads(self) -> Path:
        """File during whose presence an engine starts to load a large model."""
        return self.run_dir / "loads"


class Rank(BaseWorkload):
    """The only rank of the policy."""


class Engine(BaseWorkload):
    """An engine that only remembers its model."""

    model = ""

    @trainer_invocation(blocking=False, idempotent=True, replay="last")
    def load(self, model: str) -> None:
        if self.config.fails.exists():
            raise FileNotFoundError(f"{model} is not on this node")
        if self.config.loads.exists():
            self.config.loads.unlink()
            time.sleep(10 * WITHIN_S)
        self.model = model

    @trainer_invocation(idempotent=True)
    def state(self) -> tuple[int, int, str]:
        return self.rank, os.getpid(), self.model


class Trainer(BaseTrainer):
    """A trainer that changes the number of engines."""

    def init(self) -> None:
        """Prepare nothing."""

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + WITHIN_S
        while not is_reached():
            assert time.monotonic() < deadline, read_state(self.config.run_dir)
            time.sleep(0.05)

    def fit(self) -> None:
        self.RG_ROLLOUT.load("model").result()
        resize(2)
        self.wait_until(lambda: len(self.RG_ROLLOUT) == 2)
        _, (_, pid, _) = self.RG_ROLLOUT.state()
        os.kill(pid, signal.SIGKILL)
        print("after the loss:", [(rank, model) for rank, _, model in self.RG_ROLLOUT.state()])
        self.config.fails.touch()
        resize(3)
        self.wait_until(lambda: "could not join" in read_state(self.config.run_dir).note)
        state = read_state(self.config.run_dir)
        print("after the failure:", state.target, state.note)
        self.config.fails.unlink()
        resize(3)
        self.wait_until(lambda: len(self.RG_ROLLOUT) == 3)
        print("at the end:", [(rank, model) for rank, _, model in self.RG_ROLLOUT.state()])
        self.config.loads.touch()
        resize(4)
        self.wait_until(lambda: not self.config.loads.exists())
