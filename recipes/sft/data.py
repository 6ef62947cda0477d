"""The demonstrations of each optimizer step, in an order that a resumed run goes on with."""

import hashlib
from collections.abc import Mapping
from typing import Any

from components.batch import Batch

from .algorithm import minibatches
from .config import SFTConfig


class Demonstrations:
    """Hands out minibatches: each epoch is every demonstration once, in an order of its own."""

    def __init__(self, batch: Batch, config: SFTConfig) -> None:
        self.batch = batch
        self._size, self._seed = config.train_batch_size, config.seed
        self._steps_per_epoch = -(-len(batch) // self._size)
        self.steps = config.max_epochs * self._steps_per_epoch
        """Of the whole run."""

    def minibatch(self, step: int) -> Batch:
        """The demonstrations of one optimizer step; the first is 1."""
        epoch, position = divmod(step - 1, self._steps_per_epoch)
        return self.batch.select(minibatches(len(self.batch), self._size, self._seed, epoch)[position])

    def state_dict(self) -> dict[str, Any]:
        """What decides which demonstrations a step has; the step itself is the stream's."""
        tokens = hashlib.blake2b(self.batch["tokens"].numpy().tobytes(), digest_size=8)
        return {"tokens": tokens.hexdigest(), "train_batch_size": self._size, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See that they are those of before.

        Raises:
            ValueError: they are others, or in another order.
        """
        if state != self.state_dict():
            raise ValueError(
                "the checkpoint was written with other demonstrations, or in another order; resume with the same "
                "dataset, seed and train_batch_size, or set resume=none and another run_dir"
            )
