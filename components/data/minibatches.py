"""Mini-batches of a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def shuffled_minibatches(count: int, parts: int, epochs: int, *, seed: int, step: int) -> list[Tensor]:
    """Return the indices of each optimizer step of one training step. Each epoch is shuffled by (seed, step, epoch).

    Args:
        count: number of responses of the step.
        parts: number of optimizer steps per epoch. Their sizes differ by at most one.
        epochs: number of passes over the responses.
        seed: seed of the run.
        step: number of the training step.
    """
    import numpy as np
    import torch

    order: list[Tensor] = []
    for epoch in range(epochs):
        # A generator per epoch, so that a resumed run shuffles as the interrupted one would have.
        shuffled = np.random.default_rng([seed, step, epoch]).permutation(count)
        order += torch.from_numpy(shuffled).tensor_split(parts)
    return order
