"""Exponential moving average of a model's weights, in host memory of one rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from components.train.partitioned_model import PartitionedModel
from components.train.state import EngineState

NamedParameters = Iterable[tuple[str, Tensor]]
"""Whole parameters by name, from a collective iterator that yields all of them on rank 0 and none on other ranks. Each
rank must exhaust it, as all functions here do. A tensor may be the parameter itself, so no function keeps a
reference."""


class WeightAverage:
    """Exponential moving average: p_ema = (1 - b) * p + b * p_ema after each optimizer step, starting from p_ema = p.

    It is the average of Polyak and Juditsky 1992 ("Acceleration of stochastic approximation by averaging") with
    decaying weights, as OpenRLHF computes it with --enable_ema. It needs no bias correction: the weights before the
    first step have the factor b^n after n steps, and a weight that never changes equals its average exactly.

    The average is float32 for parameters of any dtype. Pass the float32 master weights: bfloat16 parameters do not show
    steps that are smaller than their rounding, so their average would miss those steps.
    """

    def __init__(self, beta: float, named_parameters: NamedParameters) -> None:
        """
        Args:
            beta: decay b in [0, 1). With 0 the average equals the weights.
            named_parameters: weights before the first step.
        """
        self.beta = beta
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().to("cpu", torch.float32, copy=True) for name, parameter in named_parameters
        }
        """Averages by name. Empty on ranks that get no parameters."""

    @torch.no_grad()
    def update(self, named_parameters: NamedParameters) -> None:
        """Update the average with the weights after one optimizer step, of the same names as at the start."""
        for name, parameter in named_parameters:
            # lerp_ leaves an average that equals the weight unchanged. The rounded sum (1 - b) * p + b * p would
            # differ.
            self.tensors[name].lerp_(parameter.detach().to("cpu", torch.float32), 1 - self.beta)

    @torch.no_grad()
    def restart(self, named_parameters: NamedParameters) -> None:
        """Set the average to these tensors."""
        for name, parameter in named_parameters:
            self.tensors[name].copy_(parameter)


class EngineAverage(WeightAverage):
    """Average of the master weights of a training engine. All ranks must make the same calls."""

    def __init__(self, beta: float, engine: PartitionedModel) -> None:
        """
        Args:
            beta: decay, as for `WeightAverage`.
            engine: engine before its first step.
        """
        super().__init__(beta, EngineState(engine).master_weights())

    def follow(self, engine: PartitionedModel) -> None:
        """Update the average after an optimizer step of the engine."""
        # The average follows the float32 master weights, because small steps are rounded away in bfloat16.
        self.update(EngineState(engine).master_weights())
