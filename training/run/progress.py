"""Progress of a run: counters, the time of its phases, and the checkpoints that it writes and resumes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from components import registry
from components.batch import Batch
from training.run.checkpoint import CheckpointError, Checkpoints, may_resume
from training.run.phase_clock import PhaseClock
from training.run.queue import RolloutQueue

BATCHES = Path("state", "batches")
"""Folder of the batches that were generated but not trained on, within a step folder. trainer.json lists them."""
BATCH_FILE = "__batch__"
UNRECORDED = "unrecorded"


class Saved(Protocol):
    """A part of a trainer whose state a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]: ...


@dataclass
class Progress:
    """Counters of a run, including its steps before a resume."""

    version: int = 0
    """Version of the weights that the rollout engines sample from: the number of the step that produced them."""
    tokens: int = 0
    """Number of tokens trained on, prompts included."""
    seconds: float = 0.0
    """Time of the training steps in seconds, without set-up, evaluation and checkpoints."""

    def count(self, took: Mapping[str, float], batch: Batch, memory_bytes: int = 0) -> dict[str, float]:
        """Add a step to the counters, and return metrics of its speed.

        Args:
            took: times from the clock, `timing_s/<phase>` and `timing_s/step`.
            batch: batch that the step was trained on.
            memory_bytes: memory of all processes of the job, or 0 if it is not known.

        Returns:
            `took`, and with the prefix perf/: `tokens_per_second`, prompts included; `samples_per_second` in sequences;
            `<phase>_share` of the time of the step; and `memory_gb` if it is known. The shares sum to more than 1 if
            another thread generated at the same time.
        """
        seconds = took["timing_s/step"]
        self.tokens += batch.num_tokens
        self.seconds += seconds
        counts = {"tokens_per_second": batch.num_tokens, "samples_per_second": len(batch)}
        counts |= {f"{name.removeprefix('timing_s/')}_share": phase_seconds for name, phase_seconds in took.items()}
        del counts["step_share"]  # always 1
        # A step may be shorter than the resolution of the clock, and then takes 0 s.
        rates = {f"perf/{name}": count / max(seconds, 1e-9) for name, count in counts.items()}
        return {**took, **rates} | ({"perf/memory_gb": memory_bytes / 1e9} if memory_bytes else {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters."""
        self.__dict__.update(state)


@dataclass(kw_only=True)
class RunCheckpoints:
    """Writes the checkpoints of a run when they are due, and loads the one to resume from."""

    store: Checkpoints
    """Step folders of the run."""
    stream: RolloutQueue[Any]
    """Queue of the run. It holds the number of the current step."""
    parts: dict[str, Saved]
    """Other parts of the trainer that a checkpoint holds, by name, besides the stream and its sources.

    Parts that are created from the result of `load` are added after it.
    """
    write: Callable[[Path], object]
    """Writes the state of the roles into a step folder."""
    every: int
    """Number of steps between checkpoints. With -1, only `save` and a best step write one."""
    config: Mapping[str, Any]
    """Options of this run, without API keys and tokens."""
    run_id: str
    """Id of this run. A restart of the same run resumes even if `resume` is none."""
    info: Callable[[str], None]
    """Prints a line for the user."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last `save_when_due`, logged with the next step: timing_s/checkpoint, perf/checkpoints_failed."""
    clock: PhaseClock = field(default_factory=PhaseClock)
    """Clock of the run. The time that a checkpoint takes belongs to no step."""
    unrecorded: tuple[Batch, dict[str, float]] | None = None
    """Batch and metrics of a step that was trained on but not evaluated and logged; see `record`."""
    _failed: int = 0
    saved_step: int = 0
    """Step of the newest checkpoint of this run, or 0 if there is none."""

    def load(self, resume: str, left: Callable[[], int] | None = None) -> tuple[Path, dict[str, Any]] | None:
        """Restore the parts from a checkpoint.

        Args:
            resume: see RunOptions.
            left: returns the number of remaining steps, without the queued batches. It is called after the parts are
                restored. With None, the stream keeps its number of steps.

        Returns:
            The step folder, and the state of all parts, including those that are created later. None if there is no
            checkpoint to resume from.

        Raises:
            ValueError: the data differ from those of the checkpoint, there is no checkpoint at the path that `resume`
                names, or the run cannot continue from its state.
        """
        # A new run needs no plug-in to resume.
        if not may_resume(resume, self.store.folder):
            return None
        return registry.load("checkpoint reader", "run", f"resume={resume}")(self, resume, left)

    def save_when_due(self, is_best: bool = False) -> None:
        """Write a checkpoint every `every` steps and for the best step. A failed write is reported and counted."""
        self.metrics = {}
        if not is_best and (self.every < 1 or self.stream.step % self.every):
            return
        began = time.monotonic()
        try:
            self.save()
            if is_best:
                self.store.mark_best(self.stream.step)
        except CheckpointError as error:
            # A full disk can be cleared while the run continues. The next checkpoint is another attempt.
            self._failed += 1
            self.info(f"warning: {error}; the training continues")
        seconds = time.monotonic() - began
        self.metrics = {"timing_s/checkpoint": seconds, "perf/checkpoints_failed": float(self._failed)}

    def save(self) -> None:
        """Write a checkpoint of the last finished step, if there is none yet.

        Raises:
            CheckpointError: the disk is full, read-only or not writable.
            ValueError: queued batches hold objects that cannot be written to a file.
        """
        if self.stream.step != self.saved_step:
            self._save()

    def _save(self) -> None:
        step = self.stream.step
        batches: dict[str, Batch] = {}
        state = _without_batches(self.stream.states(), "batch", batches)
        state |= {name: part.state_dict() for name, part in self.parts.items()}
        if self.unrecorded is not None:
            batch, metrics = self.unrecorded
            state[UNRECORDED] = {"batch": _without_batches(batch, "unrecorded", batches), "metrics": metrics}

        def write(folder: Path) -> None:
            for name, batch in batches.items():
                try:
                    batch.save(folder / BATCHES / name)
                except ValueError as error:
                    raise ValueError(f"a batch that was generated ahead cannot be saved: {error}") from error
            self.write(folder)

        with self.clock.beside_step("checkpoint"):
            self.store.save(step, state | {"run_id": self.run_id, "config": self.config}, write)
        self.saved_step = step


def _without_batches(value: Any, name: str, batches: dict[str, Batch]) -> Any:
    """Replace the batches of a state by file names. The batches are added to `batches` by file name."""
    # A parquet file each: as JSON, the tensors of a batch would be many times as large.
    if isinstance(value, Batch):
        batches[f"{name}.parquet"] = value
        return {BATCH_FILE: f"{name}.parquet"}
    if isinstance(value, Mapping):
        return {key: _without_batches(item, f"{name}-{key}", batches) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_batches(item, f"{name}-{i}", batches) for i, item in enumerate(value)]
    return value
