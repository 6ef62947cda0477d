"""A run that trains one model on data that is there from the start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.batch import Batch
from training.run.epochs import Epochs
from training.run.queue import RolloutQueue
from training.run.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from core import BaseTrainer, RoleGroup
    from training.options.supervised_options import SupervisedOptions
    from training.roles.supervised import SupervisedModel

Evaluate = Callable[[Batch], Mapping[str, float]]


@dataclass(frozen=True)
class TrainingData:
    """What a model is trained on, as it reads it."""

    model_path: str
    """The model to start from."""
    tokenizer: PreTrainedTokenizerBase
    """Of the model; it is exported with it."""
    train: Batch
    heldout: Batch | None
    """What is evaluated on, if anything."""


class SupervisedRun(Run[Batch]):
    """Everything of a training run but its algorithm.

    `for minibatch in run.minibatches()` runs the steps that are left, `end_step` ends each, and `finish` the run. The
    constructor lets the role load the model, and resumes from a checkpoint, if there is one.
    """

    config: SupervisedOptions

    def __init__(
        self,
        trainer: BaseTrainer,
        config: SupervisedOptions,
        recipe: Path,
        role: RoleGroup[SupervisedModel[Any]],
        data: TrainingData,
        evaluate: Evaluate,
        write: Callable[[Path], object] = lambda _: None,
        *,
        shown: Sequence[str],
    ) -> None:
        """
        Args:
            trainer: whose run it is.
            config: the shared options.
            recipe: the folder of the recipe.
            role: the ranks of the model.
            data: to train and to evaluate on.
            evaluate: (held-out examples) -> metrics; `accuracy`, where it is among them, is the score of the run.
            write: adds to the folder of an exported model what is the recipe's own.
            shown: metrics that a person sees of a step.
        """
        super().__init__(trainer, config, recipe, shown)
        self.role = role
        self.data = data
        self.evaluations: dict[str, Mapping[str, float]] = {}
        """Metrics of the held-out examples: "start", before training, and "end", the newest."""
        self._evaluate_heldout = self.clock.outside_step("evaluate", evaluate)
        self._write_own = write
        self._open()

    def minibatches(self) -> Iterator[Batch]:
        """Hand out the examples of each step that is left; the model is evaluated before the first of the run."""
        if not self.evaluations and self.data.heldout is not None:
            self.tracker.log(self.step, self._evaluate(), steps=self.steps)
        yield from self.stream

    def end_step(self, minibatch: Batch, **by_role: Mapping[str, float]) -> None:
        """Log the step, evaluate the model and write a checkpoint when they are due.

        Args:
            minibatch: what the step was trained on.
            by_role: metrics of the step, as `actor=...`; they are logged as `actor/<name>`.
        """
        step, every = self.step, self.config.evaluation.every
        found = {f"{role}/{name}": value for role, metrics in by_role.items() for name, value in metrics.items()}
        found |= self.count(minibatch)
        found |= self.checkpoints.metrics
        is_due = self.is_last_step or (every > 0 and step % every == 0)
        evaluated = self._evaluate() if is_due else {}
        with self.phase("log"):
            self.tracker.log(step, found | evaluated, steps=self.steps)
        self.note_first_step()
        self._note_progress()
        self.checkpoints.save_when_due()

    def finish(self) -> None:
        """Save what is not yet saved, and sum up."""
        self.checkpoints.save()
        self._note_progress()
        if self.is_last_step:
            self._sum_up()
        else:
            self.note_stop()
        self.tracker.close()

    def export(self, folder: Path) -> None:
        """Write model and tokenizer as a folder that `from_pretrained` loads."""
        self.role.save(str(folder))
        self.data.tokenizer.save_pretrained(folder)
        self._write_own(folder)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the run itself."""
        return dict(self.evaluations)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with it."""
        self.evaluations = dict(state)

    def _open(self) -> None:
        config = self.config
        epochs = Epochs.of(config, self.data.train)
        count, held_out = self._examples(self.data.train), self._examples(self.data.heldout)
        self.info(f"{count} {config.EXAMPLES} to train on, {held_out} held out; {epochs.steps} optimizer steps")
        stream = RolloutQueue(
            epochs.minibatch, epochs.steps, stopped=lambda: self.trainer.stop_requested, clock=self.clock
        )
        resumed = self.open(stream, {"data": epochs, "evaluations": self}, self._write_checkpoint)
        self.role.load(self.data.model_path, epochs.steps)
        if resumed is not None:
            for line in self.role.load_state(str(resumed / "state")):
                self.info(f"not exactly as before: {line}")
        self.note_setup()

    def _write_checkpoint(self, folder: Path) -> None:
        self.role.save_state(str(folder / "state"))
        self.export(folder / "hf")

    def _examples(self, batch: Batch | None) -> int:
        """How many a batch has."""
        return 0 if batch is None else len(batch) // self.config.GROUP_SIZE

    def _evaluate(self) -> dict[str, float]:
        """Metrics of the held-out examples, as they are logged; none where none are held out."""
        if self.data.heldout is None:
            return {}
        found = dict(self._evaluate_heldout(self.data.heldout))
        if "accuracy" in found:
            variance = found["accuracy"] * (1 - found["accuracy"])
            found["accuracy_standard_error"] = math.sqrt(variance / self._examples(self.data.heldout))
        self.evaluations = {"start": found} | self.evaluations | {"end": found}
        return {f"eval/{name}": value for name, value in found.items()}

    def _note_progress(self) -> None:
        self.tracker.update_summary(steps=self.step, seconds={"training": self.progress.seconds})

    def _sum_up(self) -> None:
        """Export the model, and report how its accuracy has changed, where that is measured."""
        if self.config.checkpoint.export_path:
            self.export(Path(self.config.checkpoint.export_path).expanduser())
        accuracy = {when: own["accuracy"] for when, own in self.evaluations.items() if "accuracy" in own}
        count = self._examples(self.data.heldout)
        score = accuracy | {"examples": count} if accuracy and count else None
        if score is not None:
            change = f"{score['start']:.3f} -> {score['end']:.3f}"
            self.info(f"accuracy on {count} held-out {self.config.EXAMPLES}: {change}")
        self.note_end("model", score=score)
