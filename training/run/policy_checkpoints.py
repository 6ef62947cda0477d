"""Checkpoints of a run whose rewards can fail in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from components.batch import Batch
from components.rewards.errors import RewardError
from training.run.progress import RunCheckpoints


class PolicyCheckpoints(RunCheckpoints):
    """Checkpoints that also hold a step that is trained but not evaluated yet, and batches generated ahead."""

    @contextmanager
    def kept_if_rewards_fail(self) -> Iterator[None]:
        """Call `save_unfinished` if the block raises RewardError, and raise the error again."""
        try:
            yield
        except RewardError:
            self.save_unfinished()
            raise

    def save_unfinished(self) -> None:
        """Write a checkpoint when failed rewards end a run, so that no finished work has to be repeated.

        It holds the last trained step, the queued batches, and the step that is not evaluated yet. A failed write is
        reported but not raised, because the RewardError that ends the run is being raised already.
        """
        step = self.stream.step
        waiting = self.stream.queued
        is_saved = step == self.saved_step and not waiting and self.unrecorded is None
        if is_saved or not step:  # without a trained step, a restart loses nothing, and may have other options
            return
        try:
            self._save()
        except Exception as error:  # noqa: BLE001
            self.info(f"warning: {error}; all steps since the last checkpoint are lost")
            return
        content = f"step {step}"
        if self.unrecorded is not None:
            content += ", which is not evaluated yet"
        if waiting:
            content += f", and the batches that were generated ahead ({waiting})"
        self.info(f"saved in a checkpoint: {content}; run the same command again when rewards can be computed")

    def record(
        self, evaluate: Callable[[Batch, dict[str, float]], bool], batch: Batch, metrics: dict[str, float]
    ) -> bool:
        """Evaluate and log a trained step. If that fails, `save_unfinished` saves its batch for `log_unlogged_step`.

        Args:
            evaluate: (batch, metrics) -> True if the step is the best so far.
            batch: batch that the step was trained on.
            metrics: metrics of the training step.

        Returns:
            The result of `evaluate`.
        """
        # Kept on the object and not passed on: if `evaluate` raises, `save_unfinished` finds the step here.
        self.unrecorded = batch, metrics
        is_best = evaluate(batch, metrics)
        self.unrecorded = None
        return is_best

    def log_unlogged_step(self, evaluate: Callable[[Batch, dict[str, float]], bool]) -> None:
        """Repeat `record` for the last step, if the previous run ended in it."""
        if self.unrecorded is not None:
            is_best = self.record(evaluate, *self.unrecorded)
            # The existing checkpoint of this step lacks its evaluation, so it has to be written again.
            self.saved_step = -1
            self.save_when_due(is_best)
