"""Roles of a job whose trainer checks the channels between them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from components.train.process_group import init_process_group
from core import BaseTrainer, BaseWorkload, trainer_invocation
from plugins.handshake.channels import check


@dataclass
class Placement:
    """Placement options of the job."""

    handshake_timeout: float = 3.0


@dataclass
class Settings:
    """Configuration of the job."""

    folder: Path
    stops: bool = False
    """Stop the rollout engine before the check."""
    stall_timeout: float = 0.0
    placement: Placement = field(default_factory=Placement)


class Rank(BaseWorkload):
    """A rank with a process group, whose creation has a handshake."""

    def setup(self) -> None:
        began = time.monotonic()
        self.setup_process_group(init_process_group)
        (self.config.folder / f"group-{self.rank}").write_text(str(time.monotonic() - began))

    @trainer_invocation
    def pid(self) -> int:
        return os.getpid()


class Engine(BaseWorkload):
    """An instance without a process group."""

    @trainer_invocation
    def pid(self) -> int:
        return os.getpid()


class Trainer(BaseTrainer):
    """A trainer that checks the channels once."""

    def init(self) -> None:
        """Prepare nothing."""

    def fit(self) -> None:
        (pid,) = self.RG_ROLLOUT.pid()
        if self.config.stops:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            check(self, self.config)
        finally:
            os.kill(pid, signal.SIGCONT)
            (self.config.folder / "seconds").write_text(str(time.monotonic() - began))
