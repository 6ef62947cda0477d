"""What every run has, whatever it trains: a clock, counters, checkpoints, tracking, the end of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from training.launch.early_writes import checkpoint_bytes
from training.run.phase_clock import PhaseClock
from training.run.progress import Progress, RunCheckpoints
from training.tracking import Tracker, redact

if TYPE_CHECKING:
    from collections.abc import Callable

    from components.batch import Batch
    from core import BaseTrainer
    from training.options.run_options import RunOptions
    from training.run.queue import RolloutQueue, Stateful

Item = TypeVar("Item")


class Run(Generic[Item]):
    """Owns the run folder, the checkpoints and the step counter of a trainer. See its subclasses."""

    config: Any
    stream: RolloutQueue[Item]
    checkpoints: RunCheckpoints
    tracker: Tracker

    def __init__(self, trainer: BaseTrainer, config: RunOptions, recipe: Path, shown: Sequence[str]) -> None:
        """
        Args:
            trainer: whose run it is.
            config: its options.
            recipe: the folder of the recipe; its name is the recipe's.
            shown: metrics that a person sees of a step.
        """
        self.trainer = trainer
        self.config = config
        self.recipe = recipe
        self.shown = shown
        self.clock = PhaseClock(trainer.emit)
        self.progress = Progress()

    @property
    def step(self) -> int:
        """The step at hand, from 1; 0 before the first."""
        return self.stream.step

    @property
    def steps(self) -> int:
        """Of the whole run, those before a resume included."""
        return self.stream.steps

    @property
    def is_last_step(self) -> bool:
        """Whether no step follows the one at hand."""
        return not len(self.stream)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what happens inside as `timing_s/<name>` of the step."""
        return self.clock.phase(name)

    def info(self, text: str) -> None:
        """Show a line to the person at the terminal."""
        self.trainer.info(text)

    def open(
        self,
        stream: RolloutQueue[Item],
        parts: Mapping[str, Stateful],
        write: Callable[[Path], object],
        left: Callable[[], int] | None = None,
    ) -> Path | None:
        """Open checkpoints and tracker, and set all parts to where a checkpoint was written, if there is one.

        Args:
            stream: of the run's batches.
            parts: what a checkpoint holds besides the stream and its sources, by name.
            write: fills the folder of a step's checkpoint with what the roles hold.
            left: counts the steps that are left after a resume; None: the stream knows.

        Returns:
            The folder of that checkpoint, for the roles.
        """
        own, trainer = self.config, self.trainer
        self.stream = stream
        self.checkpoints = RunCheckpoints(
            store=own.checkpoint.store(own.run_dir, checkpoint_bytes(own)),
            stream=stream,
            parts={**parts, "progress": self.progress},
            write=write,
            clock=self.clock,
            every=own.checkpoint.every,
            config=redact(trainer.config),
            run_id=trainer.run_id,
            info=self.info,
        )
        resumed = self.checkpoints.load(own.resume, left)
        self.tracker = Tracker(
            own.run_dir,
            self.recipe.name,
            trainer.config,
            own.seed,
            sinks=own.log.sinks(),
            resume_step=stream.step,
            state=resumed[1]["tracker"] if resumed else None,
            emit=trainer.emit,
            shown=self.shown,
        )
        self.checkpoints.parts["tracker"] = self.tracker
        return resumed[0] if resumed else None

    def note_setup(self) -> None:
        """Write down how long it took until the roles were ready."""
        self.tracker.update_summary(seconds={"setup": time.time() - self.trainer.began})

    def note_first_step(self) -> None:
        """Write down how long it took until the first step was over."""
        if self.step == 1:
            self.tracker.update_summary(seconds={"to_first_step": time.time() - self.trainer.began})

    def count(self, batch: Batch) -> dict[str, float]:
        """Seconds and speed of the step, what it was trained on counted in; see `Progress.count`."""
        return self.progress.count(self.clock.take(), batch, self.trainer.job_memory_bytes)

    def note_stop(self) -> None:
        """Report that the run was stopped, and how it is resumed."""
        self.info(f"stopped after step {self.step} of {self.steps}; run_dir={self.config.run_dir} continues")

    def note_end(self, what: str, **summary: Any) -> None:
        """Sum up speed and training time, and report where the trained model is."""
        seconds = self.progress.seconds
        speed = self.progress.tokens / max(seconds, 1e-9)
        self.tracker.update_summary(seconds={"training": seconds}, tokens_per_second=speed, **summary)
        self.info(f"trained {what}: {self.checkpoints.store.latest()}/hf")
