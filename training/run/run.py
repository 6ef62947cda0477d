"""Base class of all runs: clock, counters, checkpoints, tracking and the end of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from components.registry import find, load
from training.run.checkpoint_size import checkpoint_bytes
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

    CHECKPOINTS: ClassVar[type[RunCheckpoints]] = RunCheckpoints
    """Class of the checkpoints."""
    config: Any
    stream: RolloutQueue[Item]
    checkpoints: RunCheckpoints
    tracker: Tracker

    def __init__(self, trainer: BaseTrainer, config: RunOptions, recipe: Path, shown: Sequence[str]) -> None:
        """
        Args:
            trainer: trainer that executes the run.
            config: options of the run.
            recipe: folder of the recipe. Its name is the name of the recipe.
            shown: metrics of a step that are shown on the terminal.
        """
        self.trainer = trainer
        self.config = config
        self.recipe = recipe
        self.shown = shown
        self.clock = PhaseClock(trainer.emit)
        # With the plug-in light_meter, the bounds of the phases are counted too.
        self.progress: Progress = (find("progress", "bounds") or (lambda _: Progress()))(self)
        # The plug-in does nothing on one machine without several GPUs, unless it is asked to.
        if check := find("handshake", "channels"):
            check(trainer, config)

    @property
    def step(self) -> int:
        """Number of the current step, from 1. 0 before the first step."""
        return self.stream.step

    @property
    def steps(self) -> int:
        """Total number of steps of the run, including those before a resume."""
        return self.stream.steps

    @property
    def is_last_step(self) -> bool:
        """True if the current step is the last one."""
        return not len(self.stream)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time the block as the phase `timing_s/<name>` of the step."""
        return self.clock.phase(name)

    def info(self, text: str) -> None:
        """Print a line for the user."""
        self.trainer.info(text)

    def open(
        self,
        stream: RolloutQueue[Item],
        parts: Mapping[str, Stateful],
        write: Callable[[Path], object],
        left: Callable[[], int] | None = None,
    ) -> Path | None:
        """Open the checkpoints and the tracker, and restore all parts from a checkpoint if there is one.

        Args:
            stream: queue of the batches of the run.
            parts: parts that a checkpoint holds besides the stream and its sources, by name.
            write: writes the state of the roles into the folder of a checkpoint.
            left: returns the number of remaining steps after a resume. With None, the stream keeps its number of steps.

        Returns:
            The folder of the checkpoint, from which the roles resume, or None.
        """
        config = self.config
        self.stream = stream
        self.checkpoints = self.CHECKPOINTS(
            store=config.checkpoint.store(config.run_dir, checkpoint_bytes(config)),
            stream=stream,
            parts={**parts, "progress": self.progress},
            write=write,
            clock=self.clock,
            every=config.checkpoint.every,
            config=redact(self.trainer.config),
            run_id=self.trainer.run_id,
            info=self.info,
        )
        # Before the tracker, which removes the records of steps after the one that the run resumes from.
        folder, saved = self.checkpoints.load(config.resume, left) or (None, {})
        # With the plug-in rollout_writer, files of rollouts are written while the next step runs.
        self.tracker = (find("tracker", "background") or Tracker)(
            config.run_dir,
            self.recipe.name,
            self.trainer.config,
            config.seed,
            sinks=config.log.sinks(),
            resume_step=stream.step,
            state=saved and saved["tracker"],
            emit=self.trainer.emit,
            shown=self.shown,
        )
        # Added now, because the tracker is opened with the state that `load` returns.
        self.checkpoints.parts["tracker"] = self.tracker
        return folder

    def note_setup(self) -> None:
        """Record the time until the roles were ready in the summary."""
        self.tracker.update_summary(seconds={"setup": time.time() - self.trainer.began})

    def note_first_step(self) -> None:
        """Record the time until the end of the first step in the summary."""
        if self.step == 1:
            self.tracker.update_summary(seconds={"to_first_step": time.time() - self.trainer.began})

    def count(self, batch: Batch) -> dict[str, float]:
        """Count the step, and return its times and its speed; see `Progress.count`."""
        return self.progress.count(self.clock.take(), batch, self.trainer.job_memory_bytes)

    def note_stop(self) -> None:
        """Report that the run was stopped, and how to resume it."""
        self.info(f"stopped after step {self.step} of {self.steps}; set run_dir={self.config.run_dir} to continue")

    def export_trained(self) -> None:
        """Export the model of the last or the best step to `checkpoint.export_path`, if that is set."""
        options = self.config.checkpoint
        if options.export_path:
            # The plug-in copies a checkpoint. The last step is still in memory.
            export = type(self).export if options.export == "last" else load("export", options.export)
            export(self, Path(options.export_path).expanduser())

    def export(self, folder: Path) -> None:
        """Save the model and the tokenizer in a folder that `from_pretrained` loads."""
        raise NotImplementedError(f"{type(self).__name__} exports no model; define export(folder)")

    def note_end(self, kind: str, **summary: Any) -> None:
        """Record speed and training time in the summary, and report the path of the trained model."""
        seconds = self.progress.seconds
        speed = self.progress.tokens / max(seconds, 1e-9)
        self.tracker.update_summary(seconds={"training": seconds}, tokens_per_second=speed, **summary)
        self.info(f"trained {kind}: {self.checkpoints.store.latest()}/hf")
