"""The rows of each optimizer step where all data is there from the start: demonstrations, or pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from components.batch import Batch

if TYPE_CHECKING:
    from training.options.supervised_options import SupervisedOptions


class Epochs:
    """Hands out minibatches: each epoch is every group of sequences once, in an order of its own. The last minibatch of
    an epoch may be smaller; nothing is dropped.
    """

    def __init__(self, batch: Batch, *, batch_size: int, epochs: int, seed: int, group_size: int = 1) -> None:
        """
        Args:
            batch: all sequences, with `tokens`.
            batch_size: groups in an optimizer step.
            epochs: passes over the data.
            seed: of the orders.
            group_size: so many sequences that follow each other stay together: 2 for pairs.
        """
        self.batch = batch
        self._groups, self._group_size = len(batch) // group_size, group_size
        self._size, self._seed = batch_size, seed
        self._steps_per_epoch = -(-self._groups // batch_size)
        self.steps = epochs * self._steps_per_epoch
        """Of the whole run."""

    @classmethod
    def of(cls, config: SupervisedOptions, batch: Batch) -> Epochs:
        """The minibatches of a run with these options."""
        train = config.train
        return cls(
            batch, batch_size=train.batch_size, epochs=train.epochs, seed=config.seed, group_size=config.GROUP_SIZE
        )

    def minibatch(self, step: int) -> Batch:
        """The sequences of one optimizer step; the first is 1."""
        epoch, position = divmod(step - 1, self._steps_per_epoch)
        order_G = np.random.default_rng([self._seed, epoch]).permutation(self._groups)
        chosen_G = torch.from_numpy(order_G).split(self._size)[position]
        return self.batch.select((chosen_G.view(-1, 1) * self._group_size + torch.arange(self._group_size)).flatten())

    def state_dict(self) -> dict[str, Any]:
        """What decides which sequences a step has; the step itself is the stream's."""
        tokens = hashlib.blake2b(self.batch["tokens"].numpy().tobytes(), digest_size=8)
        return {"tokens": tokens.hexdigest(), "batch_size": self._size, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See that they are those of before.

        Raises:
            ValueError: they are others, or in another order.
        """
        if state != self.state_dict():
            raise ValueError(
                "the checkpoint was written with other data, or in another order; resume with the same data, "
                "evaluation.held_out, seed and train.batch_size, or set resume=none and another run_dir"
            )
