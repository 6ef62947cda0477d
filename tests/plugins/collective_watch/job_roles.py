"""Roles of a job in which one rank is stopped by a signal while the other one waits for it in a collective."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from components.train.process_group import init_process_group
from core import BaseTrainer, BaseWorkload, trainer_invocation


@dataclass
class Settings:
    """Configuration of the job."""

    run_dir: Path
    stopped: int
    """Rank that is stopped."""
    stall_timeout: float


class Rank(BaseWorkload):
    """A rank that sums a tensor over all ranks."""

    def setup(self) -> None:
        self.setup_process_group(lambda: init_process_group(86400))

    @trainer_invocation
    def train_step(self) -> float:
        if self.attempt == 1 and self.rank == self.config.stopped:
            # Once the other rank waits, and has seen this one.
            time.sleep(self.config.stall_timeout / 2)
            os.kill(os.getpid(), signal.SIGSTOP)
        values = torch.ones(1)
        dist.all_reduce(values)
        return float(values)


class Trainer(BaseTrainer):
    """A trainer that calls the ranks once."""

    def init(self) -> None:
        """Prepare nothing."""

    def fit(self) -> None:
        (self.config.run_dir / "result").write_text(str(self.RG_ACTOR.train_step()))
