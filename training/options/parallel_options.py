"""Options of the axes of parallel training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from components.ranges import Count
from components.train.config import TrainConfig, TrainOptions, parallel_faults
from training.options.schema import Options


@dataclass(kw_only=True)
class ParallelOptions(Options, group="parallel", plugin="parallel"):
    """Context, tensor and expert parallelism of training with train.engine=fsdp. Other ranks are data parallel."""

    context: Count = 1
    """Context-parallel degree, for long sequences. Each rank computes a slice of every sequence, and a subset of the
    heads in attention. Divides activation memory by this number."""
    tensor: Count = 1
    """Tensor-parallel degree. Each rank holds and computes a part of every layer's matrices, heads and vocabulary.
    Divides the memory of a layer during its computation by this number. Every layer communicates, so keep it within one
    machine."""
    expert: Count = 1
    """Expert-parallel degree, for mixtures of experts. Each rank holds whole experts, and tokens are sent to the rank
    of their experts. These ranks still train on different sequences. Divides the memory of gathered experts by this
    number."""

    def combination_faults(self, train: TrainOptions) -> Iterator[str]:
        """Yield the errors of these options in combination with those of training."""
        yield from parallel_faults(train, context=self.context, tensor=self.tensor, expert=self.expert)

    def of(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration of the training engine with these axes."""
        return replace(config, context=self.context, tensor=self.tensor, expert=self.expert)
