"""Entropy loss on a hand-worked example."""

import math

import torch

from components.rl.exploration import entropy_loss


def test_the_entropy_loss_is_the_negative_entropy() -> None:
    entropy_N = torch.tensor([0.5, math.nan, 2.0], requires_grad=True)
    actual = entropy_loss(entropy_N, torch.tensor([True, False, True]))
    assert actual.loss_N.tolist() == [-0.5, 0.0, -2.0]
    assert actual.metrics["entropy"].tolist() == [0.5, 0.0, 2.0]
    actual.loss_N.sum().backward()
    assert entropy_N.grad is not None
    assert entropy_N.grad.tolist() == [-1.0, 0.0, -1.0]
