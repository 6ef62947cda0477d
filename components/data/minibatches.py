"""Mini-batches of a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def shuffled_minibatches(count: int, parts: int, epochs: int, *, seed: int, step: int) -> list[Tensor]:
    """Indices of each optimizer step of one training step, in order: every epoch is shuffled by (seed, step, epoch).

    Args:
        count: responses of the step.
        parts: optimizer steps of an epoch; their sizes differ by at most one.
        epochs: how often the responses are gone through.
        seed: of the run.
        step: number of the training step.
    """
    import numpy as np
    import torch

    order: list[Tensor] = []
    for epoch in range(epochs):
        shuffled = np.random.default_rng([seed, step, epoch]).permutation(count)
        order += torch.from_numpy(shuffled).tensor_split(parts)
    return order
