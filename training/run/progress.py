"""How far a run is: what it has counted, how long its phases take, and the checkpoints that it resumes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from components.batch import Batch
from components.rewards.errors import RewardError
from training.run.checkpoint import (
    CheckpointError,
    Checkpoints,
    changed_options,
    find_checkpoint,
    read_state,
)
from training.run.continuation import GROUPS, unfinished_groups
from training.run.phase_clock import PhaseClock
from training.run.queue import RolloutQueue

BATCHES = Path("state", "batches")
"""Where the batches lie that were generated and not yet trained on, in a step's folder; trainer.json names them."""
_FILE = "__batch__"
_UNRECORDED = "unrecorded"


class Saved(Protocol):
    """A part of a trainer that a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]: ...


@dataclass
class Progress:
    """What a run has done so far, its parts before a resume included."""

    version: int = 0
    """Of the weights that the rollout engines sample from: the step that made them."""
    tokens: int = 0
    """Trained on, prompts included."""
    seconds: float = 0.0
    """In training steps; set-up, evaluation and checkpoints are not in it."""

    def count(self, took: Mapping[str, float], batch: Batch, memory_bytes: int = 0) -> dict[str, float]:
        """Count a step in, and say how fast it was.

        Args:
            took: of the clock, `timing_s/<phase>` and `timing_s/step`.
            batch: what was trained on.
            memory_bytes: of all processes of the job; 0: not known.

        Returns:
            `took`, and perf/: `tokens_per_second`, prompts included; `samples_per_second`, of sequences;
            `<phase>_share` of the step's time, whose sum is more than 1 where another thread generated meanwhile; and
            `memory_gb` where it is known.
        """
        seconds = took["timing_s/step"]
        self.tokens += batch.num_tokens
        self.seconds += seconds
        counts = {"tokens_per_second": batch.num_tokens, "samples_per_second": len(batch)}
        counts |= {f"{name.removeprefix('timing_s/')}_share": own for name, own in took.items()}
        del counts["step_share"]
        found = {f"perf/{name}": count / max(seconds, 1e-9) for name, count in counts.items()}
        return {**took, **found} | ({"perf/memory_gb": memory_bytes / 1e9} if memory_bytes else {})

    def state_dict(self) -> dict[str, Any]:
        """Give what `load_state_dict` needs."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.__dict__.update(state)


@dataclass(kw_only=True)
class RunCheckpoints:
    """Writes the checkpoints of one run when they are due, and finds the one to resume from."""

    store: Checkpoints
    """The step folders."""
    stream: RolloutQueue[Any]
    """Of the run, which knows its step."""
    parts: dict[str, Saved]
    """What else of the trainer a checkpoint holds, by name, besides the stream and its sources. Those that are made
    from what `load` returns are added after it.
    """
    write: Callable[[Path], object]
    """Lets the roles fill a step's folder with what they hold."""
    every: int
    """Steps between two of them; -1: only when `save` is called, or a step is the best."""
    config: Mapping[str, Any]
    """The options of this run, without keys and tokens."""
    run_id: str
    """Of this run: a restart of it continues even where `resume` says none."""
    info: Callable[[str], None]
    """Shows a line to the user."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last `save_when_due`, for the next step's metrics: `timing_s/checkpoint` and `perf/checkpoints_failed`."""
    clock: PhaseClock = field(default_factory=PhaseClock)
    """Clock of the run. The time that a checkpoint takes belongs to no step."""
    unrecorded: tuple[Batch, dict[str, float]] | None = None
    """A step that was trained on, and is not yet evaluated and written down: see `record`."""
    _failed: int = 0
    _saved_step: int = 0
    """Of the newest checkpoint of this run; 0 when there is none."""

    def load(self, resume: str, left: Callable[[], int] | None = None) -> tuple[Path, dict[str, Any]] | None:
        """Set the parts to where a checkpoint was written; None when there is none to resume from.

        Args:
            resume: as in RunOptions.
            left: counts the steps that are left, once the parts are set, without the batches that wait in the stream's
                queue; None: the stream has its number of steps.

        Returns:
            The step's folder, for the roles, and the state of all parts, of those that are made later too.

        Raises:
            ValueError: the data are others than before, there is no checkpoint where `resume` says, or it holds what
                this run cannot continue with.
        """
        folder = find_checkpoint(resume, self.store.folder, self.run_id)
        if folder is None:
            return None
        saved = read_state(folder)
        parts: dict[str, Any] = {"stream": self.stream, **self.stream.sources, **self.parts}
        missing = sorted(set(parts) - set(saved) - {GROUPS})
        if missing:
            raise ValueError(
                f"{folder} holds no state of {', '.join(missing)}: another recipe or version wrote it; set resume=none "
                "and another run_dir"
            )
        saved = _with_batches(saved, folder / BATCHES)
        if saved.get(GROUPS) and GROUPS not in parts:
            raise unfinished_groups(folder, len(saved[GROUPS]["steps"]))
        for name, part in parts.items():
            part.load_state_dict(saved.get(name, {}))
        if (unrecorded := saved.get(_UNRECORDED)) is not None:
            self.unrecorded = unrecorded["batch"], unrecorded["metrics"]
        stream = self.stream
        if left is not None:
            stream.steps = stream.step + stream.queued + left()
        # What another run has saved is not yet in the folder of this one.
        self._saved_step = stream.step if folder.parent.samefile(self.store.folder) else 0
        self.info(f"resumes after step {stream.step} of {stream.steps}, from {folder}")
        for line in changed_options(saved["config"], self.config):
            self.info(f"changed since that checkpoint: {line}")
        return folder, saved

    def save_when_due(self, is_best: bool = False) -> None:
        """Write a checkpoint every so many steps, and of the best step; one that fails is said and counted."""
        self.metrics = {}
        if not is_best and (self.every < 1 or self.stream.step % self.every):
            return
        began = time.monotonic()
        try:
            self.save()
            if is_best:
                self.store.mark_best(self.stream.step)
        except CheckpointError as error:
            self._failed += 1
            self.info(f"warning: {error}; the training continues")
        seconds = time.monotonic() - began
        self.metrics = {"timing_s/checkpoint": seconds, "perf/checkpoints_failed": float(self._failed)}

    def save(self) -> None:
        """Write a checkpoint of the step that was finished last, if there is none yet.

        Raises:
            CheckpointError: the disk does not take it.
            ValueError: batches of the stream hold objects that no file can.
        """
        if self.stream.step != self._saved_step:
            self._save()

    @contextmanager
    def kept_if_rewards_fail(self) -> Iterator[None]:
        """Around the loop: rewards that fail (RewardError) end it, after `save_unfinished`."""
        try:
            yield
        except RewardError:
            self.save_unfinished()
            raise

    def save_unfinished(self) -> None:
        """Write a checkpoint from which nothing has to be done again, where a run ends because rewards have failed.

        It is of the step that was trained on last, and holds what waits in the stream's queue, and what is unrecorded.
        That it cannot be written is said and not raised: the error that ends the run is on its way already.
        """
        step, waiting = self.stream.step, self.stream.queued
        is_saved = step == self._saved_step and not waiting and self.unrecorded is None
        if is_saved or not step:  # a run that has learnt nothing begins anew, with other options if need be
            return
        try:
            self._save()
        except Exception as error:  # noqa: BLE001
            self.info(f"warning: {error}; what was done since the checkpoint before is lost")
            return
        held = "" if self.unrecorded is None else ", whose evaluation is still to be made"
        held += f", and {waiting} batch{'es' * (waiting != 1)} of responses" if waiting else ""
        self.info(f"saved for when the rewards are back: step {step}{held}; the same command resumes")

    def record(
        self, evaluate: Callable[[Batch, dict[str, float]], bool], batch: Batch, metrics: dict[str, float]
    ) -> bool:
        """Evaluate a step that was trained on, and log it. Where that fails, `save_unfinished` keeps
        what is given here, for `log_unlogged_step`.

        Args:
            evaluate: (batch, metrics) -> whether the step is the best so far.
            batch: what the step was trained on.
            metrics: of the training.

        Returns:
            What `evaluate` does.
        """
        self.unrecorded = batch, metrics
        is_best = evaluate(batch, metrics)
        self.unrecorded = None
        return is_best

    def log_unlogged_step(self, evaluate: Callable[[Batch, dict[str, float]], bool]) -> None:
        """Where the run that is continued with ended in `record`, do that again first."""
        if self.unrecorded is not None:
            is_best = self.record(evaluate, *self.unrecorded)
            self._saved_step = -1  # the checkpoint of this step knows nothing of it
            self.save_when_due(is_best)

    def _save(self) -> None:
        step = self.stream.step
        batches: dict[str, Batch] = {}
        state = _without_batches(self.stream.states(), "batch", batches)
        state |= {name: part.state_dict() for name, part in self.parts.items()}
        if self.unrecorded is not None:
            batch, metrics = self.unrecorded
            state[_UNRECORDED] = {"batch": _without_batches(batch, "unrecorded", batches), "metrics": metrics}

        def write(folder: Path) -> None:
            for name, batch in batches.items():
                try:
                    batch.save(folder / BATCHES / name)
                except ValueError as error:
                    raise ValueError(f"a batch that was generated ahead cannot be saved: {error}") from error
            self.write(folder)

        with self.clock.beside_step("checkpoint"):
            self.store.save(step, state | {"run_id": self.run_id, "config": self.config}, write)
        self._saved_step = step


def _without_batches(value: Any, name: str, found: dict[str, Batch]) -> Any:
    """A state with names of files for its batches, which are put into `found`."""
    if isinstance(value, Batch):
        found[f"{name}.parquet"] = value
        return {_FILE: f"{name}.parquet"}
    if isinstance(value, Mapping):
        return {key: _without_batches(item, f"{name}-{key}", found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_batches(item, f"{name}-{i}", found) for i, item in enumerate(value)]
    return value


def _with_batches(value: Any, folder: Path) -> Any:
    """The state again, its batches read from `folder`."""
    if isinstance(value, list):
        return [_with_batches(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_FILE}:
        return Batch.load(folder / value[_FILE])
    return {key: _with_batches(item, folder) for key, item in value.items()}
