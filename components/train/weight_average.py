"""An exponential moving average of a model's weights, beside the model, on the CPU of one rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

NamedParameters = Iterable[tuple[str, Tensor]]
"""Whole parameters by name, as a collective iterator gives them: on rank 0 all of them, on other ranks none. Each rank
must exhaust it, and what is done here does. A tensor may be the live parameter: nothing here keeps it."""


class WeightAverage:
    """p_ema = (1 - b) * p + b * p_ema after each optimizer step, from p_ema = p before the first one.

    The average of Polyak and Juditsky 1992 ("Acceleration of stochastic approximation by averaging") with weights that
    decay, as OpenRLHF keeps it with --enable_ema. There is no correction for the start, which it does not need: the
    weights before the first step count b^n after n steps, and a weight that never changes is its own average, exactly.

    The average is float32, whatever the parameters are. It can only follow what it is given: of bfloat16 parameters it
    misses every step that is too small for them to show, so it is best given their float32 master weights.
    """

    def __init__(self, beta: float, named_parameters: NamedParameters) -> None:
        """
        Args:
            beta: b, in [0, 1); 0 is the weights themselves.
            named_parameters: the weights before the first step.
        """
        self.beta = beta
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().to("cpu", torch.float32, copy=True) for name, parameter in named_parameters
        }
        """The average by name; nothing on ranks that get no parameters."""

    @torch.no_grad()
    def update(self, named_parameters: NamedParameters) -> None:
        """Take in the weights after one optimizer step: those of all names that were there at the start."""
        for name, parameter in named_parameters:
            # In this form what is equal stays equal, which (1 - b) * p + b * p does not, being rounded.
            self.tensors[name].lerp_(parameter.detach().to("cpu", torch.float32), 1 - self.beta)

    @torch.no_grad()
    def restart(self, named_parameters: NamedParameters) -> None:
        """Take these as the average."""
        for name, parameter in named_parameters:
            self.tensors[name].copy_(parameter)
