"""Training engine based on torch's FSDP2 (`fully_shard`), over gloo on CPUs and nccl on GPUs.

It runs in the ranks of a train role or in a single process. Every decoder layer is a group, and so is the rest of the
model. The parameters of a group are gathered and freed together. Each rank keeps rows of the float32 weights and of
AdamW's moments. Within an optimizer step

    zero_stage 3    gathers a layer for each pass over it, and shards its gradient after each backward pass;
    zero_stage 2    gathers a layer once and keeps its whole gradient, which is sharded after the last backward pass:
                    more memory, and no communication for further micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from components.batch import Batch
from components.models.disk.blocks import own_block
from components.models.disk.weight_files import fill
from components.train.config import TrainConfig
from components.train.engine import TrainEngine
from components.train.optimizer import adam_of
from components.weights.gather import Part
from components.weights.parts import part_of
from plugins.fsdp.groups import partition
from plugins.fsdp.optimizer import LocalAdamW, local


class FSDPEngine(TrainEngine):
    """Training engine whose layers are sharded by rows with `fully_shard`."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        """
        Args:
            model: the same model on all ranks, or an empty one from `load_policy`. Its parameters are converted to
                float32 and sharded in place. With bf16, passes use them rounded to bfloat16.
            config: configuration of the engine.
        """
        super().__init__(model, config)
        self.axes.share(model.float())
        experts = self.axes.share_experts(model)
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        if config.precision == "bf16":
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # Parameters outside of layers stay gathered after the forward pass (`rest_lets_go` is False). The backward pass
        # begins with them, so they would be gathered again immediately.
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
        # With offloading the shards are in host memory, and stay there between passes.
        device = self.device
        if config.adam_offload:
            device = torch.device("cpu")
        fill(model, device)
        self.adam = adam_of(model, config, LocalAdamW)
        self._start_average()

    @property
    def _passes_are_collective(self) -> bool:
        return True

    def forward(self, batch: Batch, compute: Callable[[nn.Module, Batch], Tensor], *, adapters: bool = True) -> Tensor:
        """See `TrainEngine.forward`."""
        try:
            return super().forward(batch, compute, adapters=adapters)
        finally:
            # FSDP keeps gathered parameters for the backward pass. Without one they would remain in memory, and would
            # be stale after the next optimizer step.
            for group in self._groups:
                group.reshard()

    def _begin_pass(self, is_last: bool) -> None:
        ends = is_last or self.config.zero_stage == 3
        self._groups[-1].set_requires_gradient_sync(ends)
        self._groups[-1].set_reshard_after_backward(ends)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _read(self, values: Tensor) -> list[float]:
        trained = [p for p in self.model.parameters() if p.grad is not None]
        # The gradient of a parameter that several ranks hold must count once in the norm.
        counted = [local(p.grad) for p in trained if own_block(p).is_first]
        # The squares are summed locally and then over the ranks. With DTensors the sum would be computed on the device
        # of the gradients, and nccl cannot reduce tensors in host memory (adam_offload).
        squares = nn.utils.get_total_norm(counted).double().square().to(self.device)
        dist.all_reduce(squares)
        *numbers, square = torch.cat([values, squares.view(1)]).tolist()
        self._norm = math.sqrt(square)
        return numbers

    def _step(self, learning_rate: float) -> float:
        norm = self._norm
        self._check_gradient(norm)
        if 0 < self.config.max_grad_norm < norm:
            # The small constant is that of torch's clip_grad_norm_, so that both give the same gradients.
            scale = self.config.max_grad_norm / (norm + 1e-6)
            gradients = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.adam.step()
        self.adam.zero_grad()
        return norm

    def _part(self, parameter: nn.Parameter, dtype: torch.dtype) -> Part:
        return part_of(parameter, dtype, self.device)
