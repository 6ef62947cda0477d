"""A job shown on a terminal, and output of libraries in its driver.

python -m tests.training.terminal.terminal_roles RUN_DIR SECONDS runs it. Its sleepers return after SECONDS.
"""

import ctypes
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from core import BaseTrainer, BaseWorkload, Job, JobBuilder, trainer_invocation
from training.launch.launch import run_job
from training.tracking import StepEvent


class Sleeper(BaseWorkload):
    """A worker that sleeps for the requested time."""

    @trainer_invocation(blocking=False)
    def slumber(self, seconds: float) -> None:
        """Do nothing."""
        time.sleep(seconds)


class Watched(BaseTrainer):
    """A trainer that reports three steps while the sleepers sleep."""

    RG_SLEEPER: Any

    def init(self) -> None:
        """Do nothing."""

    def fit(self) -> None:
        """Print a line, and text as a model might have written it."""
        asleep = self.RG_SLEEPER.slumber(self.config)
        self.info("the first line")
        for step in (1, 2, 3):
            metrics = {"reward/score": step / 4, "timing_s/step": 0.5}
            sample = {"prompt": "1+1=", "response": "\x1b[2J[bold]2[/bold]\r\x07", "reward": 1.0}
            self.emit(StepEvent(step, 3, 0.0, metrics, tuple(metrics), sample))
        asleep.result()


class Noisy:
    """Return the job, in a driver whose libraries write arbitrary output."""

    def __init__(self, job: Job) -> None:
        self.roles, self._job = job.roles, job

    def submit(self, job_name: str = "job", **options: Any) -> Any:
        """Run the job."""
        os.write(2, b"raylet: something is odd\n")
        ctypes.CDLL(None).write(1 if os.path.sameopenfile(1, 2) else 2, b"written by C\n", 13)
        library = ("some.library", logging.WARNING, "/lib/site-packages/some/library.py", 1, "dull", None, None)
        logging.getLogger("some.library").handle(logging.LogRecord(*library))
        logging.getLogger(__name__).warning("of our own")
        return self._job.submit(job_name, **options)


def main(run_dir: str, seconds: str) -> int:
    """Run the job, and return its exit code."""
    builder = JobBuilder().device_type("CPU").config(float(seconds)).recovery(stop_grace=600.0)
    builder.role("trainer").run(f"{__name__}:Watched")
    builder.role("sleeper").run(f"{__name__}:Sleeper").total(2)
    job: Any = Noisy(builder.build())
    return run_job(job, recipe="demo", run_dir=Path(run_dir), seed=1, backend="ray", began=time.time())


if __name__ == "__main__":
    from tests.training.terminal import terminal_roles  # registered under the name by which its workers import it

    sys.exit(terminal_roles.main(*sys.argv[1:]))
