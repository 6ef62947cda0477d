"""Base class of the roles that train a model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from components.batch import Batch
from components.data.minibatches import shuffled_minibatches
from components.models.loading import load_policy
from components.registry import find, load
from components.rl.aggregation import LossOutput, Totals
from components.train.engine import LossFunction, TrainEngine
from components.train.process_group import init_process_group
from components.train.state import save_state
from core import BaseWorkload, rpc, trainer_invocation
from training.roles.updates import keep_failed, over_updates

Prepare = Callable[[Batch, int], Batch]


def of_rank0(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of rank 0. They are the same on every rank."""
    return metrics[0]


def policy_to_train(path: str, config: Any) -> nn.Module:
    """Return the causal model at `path` with the options `model` and `train`. The engine loads its weights."""
    train = config.train
    attention = config.model.attn_implementation
    checkpointing = bool(train.gradient_checkpointing)
    return load_policy(
        path, gradient_checkpointing=checkpointing, attn_implementation=attention, packing=train.packing, empty=True
    )


class TrainedModel(BaseWorkload):
    """One rank of a model that is trained. A subclass opens `self.engine` around its model and defines `loss`."""

    engine: TrainEngine

    def setup(self) -> None:
        """Initialize the process group of the ranks before a library creates another one."""
        # The default timeout is a day: core ends workers that hang, and a shorter one would end ranks that wait for a
        # slow but healthy rank, such as one that writes a checkpoint.
        self.setup_process_group(init_process_group)

    def loss(self, model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        """Return loss and metrics of one micro-batch, normalised by `totals` of the whole optimizer step."""
        raise NotImplementedError(f"{type(self).__name__} has no loss; define loss(model, micro, totals)")

    @property
    def state_name(self) -> str:
        """Name of this role's folder within `state/` of a checkpoint."""
        return self.role.lower()

    def train(
        self,
        experience: Batch,
        step: int,
        minibatches: Iterable[Tensor],
        loss: LossFunction,
        prepare: Prepare | None = None,
    ) -> dict[str, float]:
        """Run one optimizer step per mini-batch.

        Args:
            experience: all responses of the training step. Each rank computes a share of each optimizer step, so the
                result does not depend on the number of ranks.
            step: number of the training step, for messages.
            minibatches: indices of the responses of each mini-batch.
            loss: (model, micro-batch, totals) -> loss and metrics.
            prepare: (mini-batch, its index from 0) -> mini-batch, called before it is split into micro-batches.

        Returns:
            Means of the metrics over the optimizer steps; see `over_updates`.

        Raises:
            FloatingPointError: the loss or its gradient is not finite. The mini-batch is saved in the run folder.
        """
        history = []
        for index, chosen_B in enumerate(minibatches):
            minibatch = experience.select(chosen_B)
            if prepare is not None:
                minibatch = prepare(minibatch, index)
            if index == 0 and "logprob" in minibatch:
                # The policy has not changed since the old log-probs were computed. Without the column, `old_logprobs`
                # returns those of the training pass, and the ratio is exactly 1. The earlier pass may have had other
                # rows in its micro-batches, so its matrix products round differently.
                minibatch = minibatch.without("logprob")
            try:
                history.append(self.engine.train_step(minibatch, loss))
            except FloatingPointError as error:
                where = keep_failed(self.config.run_dir, step, self.state_name, minibatch, self.rank)
                raise FloatingPointError(f"step {step}: {error}; {where}") from error
        self.record_weights(step)
        return over_updates(history)

    def record_weights(self, step: int) -> None:
        """Record a digest of the weights in the run folder, so that a replay of the step can be compared with it."""
        if (record := find("weights record", "digest")) is not None:
            record(self.engine, self.config.run_dir, step, self.state_name)

    def train_epochs(
        self, experience: Batch, step: int, loss: LossFunction, prepare: Prepare | None = None
    ) -> dict[str, float]:
        """Train on all responses of a step, in the mini-batches and epochs that the options set; see `train`."""
        config = self.config
        count = len(experience)
        parts = config.optimizer_steps(count)
        minibatches = shuffled_minibatches(count, parts, config.train.epochs, seed=config.seed, step=step)
        return self.train(experience, step, minibatches, loss, prepare)

    @rpc()
    def sleep_learner(self) -> int:
        """Move the training state to host memory until `wake_learner`. Return the bytes of GPU memory freed."""
        return self.engine.sleep()

    @rpc()
    def wake_learner(self) -> None:
        """Move the training state back to the device."""
        self.engine.wake()

    @trainer_invocation
    def save_state(self, folder: str) -> None:
        """Save the training state in the `state` folder of a checkpoint. Each rank writes its part."""
        save_state(self.engine, f"{folder}/{self.state_name}")

    @trainer_invocation(post_func=lambda notes: notes[0])
    def load_state(self, folder: str) -> list[str]:
        """Resume from a checkpoint. Return a list of notes about state that could not be restored exactly."""
        return load("checkpoint reader", "engine")(self.engine, f"{folder}/{self.state_name}")

    @trainer_invocation
    def save(self, path: str) -> None:
        """Save the model in a folder that `from_pretrained` loads. All ranks gather the weights, and rank 0 writes."""
        self.engine.save_hf(path)
