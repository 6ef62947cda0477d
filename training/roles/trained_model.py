"""What every role that trains a model does."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from components.batch import Batch
from components.data.minibatches import shuffled_minibatches
from components.models.loading import load_policy
from components.rl.aggregation import LossOutput, Totals
from components.train.engine import LossFunction, TrainEngine
from components.train.process_group import init_process_group
from core import BaseWorkload, rpc, trainer_invocation
from training.roles.updates import keep_failed, over_updates

COLLECTIVE_S = 86400.0
"""Seconds that a collective waits for a rank."""
Prepare = Callable[[Batch, int], Batch]


def of_rank0(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of metrics that are the same on every rank those of the first."""
    return metrics[0]


def policy_to_train(path: str, config: Any) -> nn.Module:
    """The causal model at `path` as the options `model` and `train` want it; the engine around it reads its weights."""
    train = config.train
    attention, checkpointing = config.model.attn_implementation, train.gradient_checkpointing
    return load_policy(
        path, gradient_checkpointing=checkpointing, attn_implementation=attention, packing=train.packing, empty=True
    )


class TrainedModel(BaseWorkload):
    """One rank of a model that is trained. A subclass opens `self.engine` around its model, and declares its `loss`."""

    engine: TrainEngine

    def setup(self) -> None:
        """Meet the other ranks before any library can make a process group of its own."""
        # Core ends who hangs. Who makes progress, as in writing a checkpoint, may keep the others waiting.
        self.setup_process_group(lambda: init_process_group(COLLECTIVE_S))

    def loss(self, model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        """Loss and metrics of one micro-batch, normalised over the whole optimizer step by `totals`."""
        raise NotImplementedError(f"{type(self).__name__} has no loss; define loss(model, micro, totals)")

    @property
    def state_name(self) -> str:
        """The folder of this role within `state/` of a checkpoint."""
        return self.role.lower()

    def train(
        self,
        experience: Batch,
        step: int,
        minibatches: Iterable[Tensor],
        loss: LossFunction,
        prepare: Prepare | None = None,
    ) -> dict[str, float]:
        """One optimizer step per mini-batch.

        Args:
            experience: all of the step's responses; every rank takes its share of each optimizer step, so the number of
                ranks changes nothing.
            step: its number, for messages.
            minibatches: the indices of each.
            loss: (model, micro-batch, totals) -> loss and metrics.
            prepare: (mini-batch, its number from 0) -> the mini-batch, before it is cut into micro-batches.

        Returns:
            Means over the optimizer steps, see `over_updates`.

        Raises:
            FloatingPointError: the loss or its gradient is not finite; the mini-batch is kept in the run folder.
        """
        history = []
        for index, chosen_B in enumerate(minibatches):
            minibatch = experience.select(chosen_B)
            if prepare is not None:
                minibatch = prepare(minibatch, index)
            if index == 0 and "logprob" in minibatch:
                # The policy is still the one of the old log-probs, so `old_logprobs` returns those of the pass that
                # trains, and the ratio is exactly 1. An earlier pass may have other rows in its micro-batches, whose
                # products round otherwise.
                minibatch = minibatch.without("logprob")
            try:
                history.append(self.engine.train_step(minibatch, loss))
            except FloatingPointError as error:
                where = keep_failed(self.config.run_dir, step, self.state_name, minibatch, self.rank)
                raise FloatingPointError(f"step {step}: {error}; {where}") from error
        return over_updates(history)

    def train_epochs(
        self, experience: Batch, step: int, loss: LossFunction, prepare: Prepare | None = None
    ) -> dict[str, float]:
        """Train on all of a step's responses, in as many mini-batches and epochs as the options have; see `train`."""
        config = self.config
        count = len(experience)
        parts = config.optimizer_steps(count)
        minibatches = shuffled_minibatches(count, parts, config.train.epochs, seed=config.seed, step=step)
        return self.train(experience, step, minibatches, loss, prepare)

    @rpc()
    def sleep_learner(self) -> int:
        """Let what is trained wait in host memory until `wake_learner`; returns how many bytes of a GPU are freed."""
        return self.engine.sleep()

    @rpc()
    def wake_learner(self) -> None:
        """Be ready for everything else."""
        self.engine.wake()

    @trainer_invocation
    def save_state(self, folder: str) -> None:
        """Write the training state into the `state` folder of a checkpoint; all ranks write a part."""
        self.engine.save_state(f"{folder}/{self.state_name}")

    @trainer_invocation(post_func=lambda notes: notes[0])
    def load_state(self, folder: str) -> list[str]:
        """Resume exactly where `save_state` was called; what cannot be exact is returned in words."""
        return self.engine.load_state(f"{folder}/{self.state_name}")

    @trainer_invocation
    def save(self, path: str) -> None:
        """Write a folder that `from_pretrained` loads; rank 0 writes what all ranks gather."""
        self.engine.save_hf(path)
