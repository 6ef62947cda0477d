"""Engine of a model that is evaluated and never trained, such as a reference or reward model.

The weights are either whole on each device, or sharded by rows over the ranks (FSDP2), on the device or in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.models.device import compute_device
from components.models.disk.weight_files import fill
from components.models.loading import load_policy
from components.models.precision import compute_in, round_products
from components.registry import load
from components.train.config import FrozenConfig, weight_type
from components.train.passes import evaluate_together

M = TypeVar("M", bound=nn.Module)


class FrozenEngine(Generic[M]):
    """Engine of one frozen model, on the GPU if there is one.

    If the model is sharded, all ranks must make the same calls in the same order.
    """

    def __init__(self, model: M, config: FrozenConfig) -> None:
        """
        Args:
            model: model with weights of the dtype `weight_type(config.precision)`, which is changed in place. If it was
                created empty, the engine reads the weights that this rank keeps.
            config: configuration of the engine.
        """
        self.config = config
        self.device = compute_device()
        self.model = model.eval().requires_grad_(False)
        round_products(model, config.precision)
        compute_in(model, config.precision, self.device)
        # Sharding comes before `fill`, so that each rank reads and allocates only its shard.
        if config.is_collective:
            self._partition()
        fill(model, "cpu" if config.layout == "offloaded" else self.device)
        if not config.is_collective:
            model.to(self.device)

    def _partition(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from components.train.mesh import all_ranks
        from components.train.process_group import init_process_group

        init_process_group()
        offload = self.config.layout == "offloaded"
        # The default policy casts nothing: the weights already have the dtypes in which passes compute.
        plain = MixedPrecisionPolicy()
        mesh = all_ranks(self.device)
        partition = load("sharding", "fsdp", "placement.frozen_models")
        partition(self.model, self.device, plain, mesh, offload=offload, layers_let_go=True, rest_lets_go=True)

    def forward(self, batch: Batch, compute: Callable[[M, Batch], Tensor]) -> Tensor:
        """Evaluate `batch` in micro-batches.

        Args:
            batch: sequences of this rank. Ranks may have different numbers of sequences.
            compute: function (model, micro-batch of n tokens) -> [n].

        Returns:
            [N] on the CPU, in the order of `batch`.

        Raises:
            ValueError: the model is sharded, and this rank has no sequence while others have some.
        """
        config = self.config
        return evaluate_together(self.model, batch, config.limits, self.device, compute, config.is_collective)


def is_read_by_parts(config: FrozenConfig) -> bool:
    """True if the model of such an engine should be created empty, so that the engine reads its shard.

    A whole model on a CPU is loaded directly instead: its weights are the mapped file, which takes no further memory.
    """
    return config.is_collective or torch.cuda.is_available()


def open_frozen_policy(
    path: str | Path, config: FrozenConfig, attn_implementation: str | None = None
) -> FrozenEngine[nn.Module]:
    """Load a causal language model into a `FrozenEngine`.

    Args:
        path: folder or hub name of the model.
        config: configuration of the engine.
        attn_implementation: as for `load_policy`.
    """
    model = load_policy(
        path,
        weight_type(config.precision),
        attn_implementation=attn_implementation,
        packing=config.packing,
        empty=is_read_by_parts(config),
    )
    return FrozenEngine(model, config)
