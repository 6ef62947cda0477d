"""Training with torch's FSDP2 (`fully_shard`): CPU over gloo and CUDA over nccl, in a train role's ranks or alone.

Every decoder layer, and the rest of the model, is one group whose parameters are gathered and let go of together. What
each rank keeps are rows of the float32 weights and of AdamW's moments. Within an optimizer step

    zero_stage 3    gathers a layer for each pass over it, and partitions its gradient after each backward pass;
    zero_stage 2    gathers a layer once and keeps its whole gradient, which is partitioned after the last backward
                    pass: more memory, and no communication for further micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from components.batch import Batch
from components.models.disk.blocks import local_part, own_block
from components.models.disk.weight_files import fill
from components.train.config import TrainConfig
from components.train.engine import TrainEngine
from components.train.fsdp_groups import partition
from components.train.optimizer import adam_of
from components.weights.gather import Part, part_of


class FSDPEngine(TrainEngine):
    """A model whose layers torch partitions by rows."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        """
        Args:
            model: the same on all ranks, or made empty by `load_policy`; its parameters become float32 and
                partitioned, in place. With bf16 passes use them rounded.
            config: of this engine.
        """
        super().__init__(model, config)
        self.axes.share(model.float())
        experts = self.axes.share_experts(model)
        is_bf16 = config.precision == "bf16"
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if is_bf16 else None, reduce_dtype=torch.float32)
        # What no layer has is needed again when the backward pass begins, at once.
        self._groups = partition(
            model,
            self.device,
            precision,
            self.axes.shards,
            offload=config.adam_offload,
            layers_let_go=config.zero_stage == 3,
            experts=experts,
            copies=self.axes.copies,
        )
        fill(model, "cpu" if config.adam_offload else self.device)
        self._adam = adam_of(model, config)
        self._start_average()

    @property
    def _passes_are_collective(self) -> bool:
        return True

    def forward(self, batch: Batch, compute: Callable[[nn.Module, Batch], Tensor], *, adapters: bool = True) -> Tensor:
        """Evaluate `batch` without gradients, in micro-batches; as `TrainEngine.forward` says."""
        try:
            return super().forward(batch, compute, adapters=adapters)
        finally:
            # What a forward pass keeps for its backward pass stays where there is none, and would get stale.
            for group in self._groups:
                group.reshard()

    def _begin_pass(self, is_last: bool) -> None:
        ends = is_last or self.config.zero_stage == 3
        self._groups[-1].set_requires_gradient_sync(ends)
        self._groups[-1].set_reshard_after_backward(ends)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _step(self, learning_rate: float) -> float:
        trained = [p for p in self.model.parameters() if p.grad is not None]
        gradients = [local_part(p.grad) for p in trained]
        # What several ranks have counts once.
        counted = [gradient for p, gradient in zip(trained, gradients, strict=True) if own_block(p).is_first]
        # Each rank's part of the squares: DTensors would add them up where they lie, and nccl has no host memory.
        squares = nn.utils.get_total_norm(counted).double().square().to(self.device)
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        self._check_gradient(norm)
        if 0 < self.config.max_grad_norm < norm:
            for gradient in gradients:
                gradient.mul_(self.config.max_grad_norm / (norm + 1e-6))
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self._adam.zero_grad()
        return norm

    def _part(self, parameter: nn.Parameter, dtype: torch.dtype) -> Part:
        return part_of(parameter, dtype, self.device)
