"""Options of the axes of parallel training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from components.ranges import Count
from components.train.config import TrainConfig, TrainOptions, parallel_faults
from training.options.schema import Options


@dataclass(kw_only=True)
class ParallelOptions(Options, group="parallel", plugin="parallel"):
    """Context, tensor and expert parallelism of training, with train.engine=fsdp. The other ranks are data parallel."""

    context: Count = 1
    """Ranks that share each sequence, for long ones: each computes a stretch of its tokens, and in attention a share of
    the heads. Activations are divided by it."""
    tensor: Count = 1
    """Ranks that share each layer: each has a part of its matrices, heads and vocabulary, and computes with it. What a
    layer takes while it is computed is divided by it. It communicates in every layer: set it within a machine."""
    expert: Count = 1
    """Ranks that share the experts of a mixture's layers: each has whole experts, and tokens go to where theirs are.
    These ranks have sequences of their own all the same. What is gathered of experts is divided by it."""

    def faults_beside(self, train: TrainOptions) -> Iterator[str]:
        """Why a model with these options cannot be trained so."""
        yield from parallel_faults(train, context=self.context, tensor=self.tensor, expert=self.expert)

    def of(self, config: TrainConfig) -> TrainConfig:
        """The engine's configuration with these axes."""
        return replace(config, context=self.context, tensor=self.tensor, expert=self.expert)
