"""A run that trains one model on a fixed dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.batch import Batch
from components.registry import load
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
    """Tokenized data of a run, and the model that they are for."""

    model_path: str
    """Path of the initial model."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the model. It is exported with the model."""
    train: Batch
    heldout: Batch | None
    """Held-out examples, or None."""


class SupervisedRun(Run[Batch]):
    """A training run without its algorithm.

    `for minibatch in run.minibatches()` iterates over the remaining steps. Call `end_step` at the end of each step and
    `finish` at the end of the run. The constructor loads the model, and resumes from a checkpoint if there is one.
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
            trainer: trainer that executes the run.
            config: options of the run.
            recipe: folder of the recipe.
            role: ranks of the model.
            data: examples to train and to evaluate on.
            evaluate: (held-out examples) -> metrics. If they include `accuracy`, it is the score of the run.
            write: adds files of the recipe to the folder of an exported model.
            shown: metrics of a step that are shown on the terminal.
        """
        super().__init__(trainer, config, recipe, shown)
        self.role = role
        self.data = data
        self.evaluations: dict[str, Mapping[str, float]] = {}
        """Metrics of the held-out examples at the "start" (before training) and at the "end" (the newest)."""
        self._evaluate_heldout = self.clock.outside_step("evaluate", evaluate)
        self._write_own = write
        self._open()

    def minibatches(self) -> Iterator[Batch]:
        """Yield the examples of each remaining step. The model is evaluated before the first step of the run."""
        if not self.evaluations and self.data.heldout is not None:
            self.tracker.log(self.step, self._evaluate(), steps=self.steps)
        yield from self.stream

    def end_step(self, minibatch: Batch, **by_role: Mapping[str, float]) -> None:
        """Log the step, evaluate the model and write a checkpoint when they are due.

        Args:
            minibatch: examples that the step was trained on.
            by_role: metrics of the step, such as `actor=...`, which are logged as `actor/<name>`.
        """
        every = self.config.evaluation.every
        logged = {f"{role}/{name}": value for role, metrics in by_role.items() for name, value in metrics.items()}
        logged |= self.count(minibatch) | self.checkpoints.metrics
        if self.is_last_step or (every > 0 and self.step % every == 0):
            logged |= self._evaluate()
        with self.phase("log"):
            self.tracker.log(self.step, logged, steps=self.steps)
        self.note_first_step()
        self._note_progress()
        self.checkpoints.save_when_due(self._is_best(logged))

    def finish(self) -> None:
        """Save the last checkpoint, write the summary, and close the tracker."""
        self.checkpoints.save()
        self._note_progress()
        if self.is_last_step:
            self._sum_up()
        else:
            self.note_stop()
        self.tracker.close()

    def export(self, folder: Path) -> None:
        """Save the model and the tokenizer in a folder that `from_pretrained` loads."""
        self.role.save(str(folder))
        self.data.tokenizer.save_pretrained(folder)
        self._write_own(folder)

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics of the evaluations, which a checkpoint holds."""
        return dict(self.evaluations)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the metrics of the evaluations."""
        self.evaluations = dict(state)

    def _open(self) -> None:
        config = self.config
        epochs = Epochs.of(config, self.data.train)
        count = self._examples(self.data.train)
        held_out = self._examples(self.data.heldout)
        self.info(f"{count} {config.noun} to train on, {held_out} held out; {epochs.steps} optimizer steps")
        stream = RolloutQueue(
            epochs.minibatch, epochs.steps, stopped=lambda: self.trainer.stop_requested, clock=self.clock
        )
        resumed = self.open(stream, {"data": epochs, "evaluations": self}, self._write_checkpoint)
        self.role.load(self.data.model_path, epochs.steps)
        if resumed is not None:
            for note in self.role.load_state(str(resumed / "state")):
                self.info(f"not exactly as before: {note}")
        self.note_setup()

    def _write_checkpoint(self, folder: Path) -> None:
        self.role.save_state(str(folder / "state"))
        self.export(folder / "hf")

    def _examples(self, batch: Batch | None) -> int:
        """Return the number of examples of a batch."""
        return len(batch or ()) // self.config.GROUP_SIZE

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the held-out examples. Return the metrics as `eval/<name>`; empty without held-out examples."""
        if self.data.heldout is None:
            return {}
        metrics = dict(self._evaluate_heldout(self.data.heldout))
        if "accuracy" in metrics:
            # Variance of a Bernoulli variable, whose mean over n examples has the standard error sqrt(variance / n).
            variance = metrics["accuracy"] * (1 - metrics["accuracy"])
            metrics["accuracy_standard_error"] = math.sqrt(variance / self._examples(self.data.heldout))
        # The start keeps the first metrics and the end always has the newest.
        self.evaluations = {"start": metrics} | self.evaluations | {"end": metrics}
        return {f"eval/{name}": value for name, value in metrics.items()}

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return True if the best step is exported, and a step with these metrics is the best so far."""
        if self.config.checkpoint.export == "last":
            return False
        return load("best step", "heldout")(self.evaluations, metrics, self.step)

    def _note_progress(self) -> None:
        self.tracker.update_summary(steps=self.step, seconds={"training": self.progress.seconds})

    def _sum_up(self) -> None:
        """Export the model, and report the change of its accuracy if it is measured."""
        self.export_trained()
        accuracy = {when: metrics["accuracy"] for when, metrics in self.evaluations.items() if "accuracy" in metrics}
        count = self._examples(self.data.heldout)
        score = None
        if accuracy and count:
            score = accuracy | {"examples": count}
            change = f"{score['start']:.3f} -> {score['end']:.3f}"
            self.info(f"accuracy on {count} held-out {self.config.noun}: {change}")
        self.note_end("model", score=score)
