"""The examples of each optimizer step for recipes with a fixed dataset: demonstrations or pairs."""

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
    """Iterates over minibatches. Each epoch visits every group of sequences once, in a different random order.

    The last minibatch of an epoch may be smaller than the others. No group is dropped.
    """

    def __init__(self, batch: Batch, *, batch_size: int, epochs: int, seed: int, group_size: int = 1) -> None:
        """
        Args:
            batch: all sequences, with `tokens`.
            batch_size: number of groups in an optimizer step.
            epochs: number of passes over the data.
            seed: seed of the random orders.
            group_size: number of consecutive sequences that stay together, such as 2 for pairs.
        """
        self.batch = batch
        self._group_size = group_size
        self._groups = len(batch) // group_size
        self._size = batch_size
        self._seed = seed
        self._steps_per_epoch = -(-self._groups // batch_size)
        self.steps = epochs * self._steps_per_epoch
        """Number of optimizer steps of the whole run."""

    @classmethod
    def of(cls, config: SupervisedOptions, batch: Batch) -> Epochs:
        """Create the minibatches of a run with these options."""
        train = config.train
        epochs = cls(
            batch, batch_size=train.batch_size, epochs=train.epochs, seed=config.seed, group_size=config.GROUP_SIZE
        )
        epochs.steps = config.steps(len(batch) // config.GROUP_SIZE)
        return epochs

    def minibatch(self, step: int) -> Batch:
        """Return the sequences of an optimizer step. Steps are counted from 1."""
        epoch, position = divmod(step - 1, self._steps_per_epoch)
        # The order depends on (seed, epoch) alone, so a resumed run needs no state but the step to continue it.
        order_G = np.random.default_rng([self._seed, epoch]).permutation(self._groups)
        chosen_G = torch.from_numpy(order_G).split(self._size)[position]
        return self.batch.select((chosen_G.view(-1, 1) * self._group_size + torch.arange(self._group_size)).flatten())

    def state_dict(self) -> dict[str, Any]:
        """Return what determines the sequences of each step. The queue saves the step number."""
        # A digest, because the step number means other examples if a file has changed since the checkpoint.
        tokens = hashlib.blake2b(self.batch["tokens"].numpy().tobytes(), digest_size=8)
        return {"tokens": tokens.hexdigest(), "batch_size": self._size, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the data and their order are those of the checkpoint.

        Raises:
            ValueError: the data or their order differ.
        """
        if state != self.state_dict():
            raise ValueError(
                "the checkpoint was written with other data, or in another order; resume with the same data, "
                "evaluation.held_out, seed and train.batch_size, or set resume=none and another run_dir"
            )
