"""A model that is evaluated and never trained: a reference, a reward model.

It is whole on its device, or its layers are partitioned by rows over the ranks (FSDP2), on the device or on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.models.device import compute_device
from components.models.disk.blocks import local_part, own_block
from components.models.disk.export import save_model
from components.models.disk.weight_files import WeightFiles, fill
from components.models.loading import load_policy
from components.models.precision import compute_in, round_products
from components.train.config import FrozenConfig, weight_type
from components.train.passes import evaluate_together

M = TypeVar("M", bound=nn.Module)


class FrozenEngine(Generic[M]):
    """One model, on the GPU when there is one. If it is sharded, all ranks make the same calls in the same order."""

    def __init__(self, model: M, config: FrozenConfig) -> None:
        """
        Args:
            model: with weights of `config.weight_type`, perhaps made empty, then the engine reads what this rank
                keeps; it is changed in place.
            config: of this engine.
        """
        self.config = config
        self.device = compute_device()
        self.model = model.eval().requires_grad_(False)
        round_products(model, config.precision)
        compute_in(model, config.precision, self.device)
        if config.is_collective:
            self._partition()
        fill(model, "cpu" if config.layout == "offloaded" else self.device)
        if not config.is_collective:
            model.to(self.device)

    def _partition(self) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from components.train.fsdp_groups import partition
        from components.train.mesh import all_ranks
        from components.train.process_group import init_process_group

        init_process_group()
        offload = self.config.layout == "offloaded"
        # Weights are kept in the types that passes use.
        plain = MixedPrecisionPolicy()
        mesh = all_ranks(self.device)
        partition(self.model, self.device, plain, mesh, offload=offload, layers_let_go=True, rest_lets_go=True)

    def forward(self, batch: Batch, compute: Callable[[M, Batch], Tensor]) -> Tensor:
        """Evaluate `batch` in micro-batches.

        Args:
            batch: this rank's own; ranks may have different numbers of sequences.
            compute: (model, micro-batch of n tokens) -> [n].

        Returns:
            [N] on the CPU, in the order of `batch`.

        Raises:
            ValueError: the model is sharded, and this rank has no sequence where others have some.
        """
        own = self.config
        return evaluate_together(self.model, batch, own.limits, self.device, compute, own.is_collective)

    @torch.no_grad()
    def mix(self, folder: str | Path, share: float) -> None:
        """Move the weights towards those of a folder of the same model: (1 - share) * own + share * theirs, in the
        type of the weights. Each rank reads what it keeps.
        """
        model: Any = self.model
        with WeightFiles(model, Path(folder)) as files:
            for name, parameter in self.model.named_parameters():
                own = local_part(parameter.detach())
                theirs = torch.empty_like(own)
                files.read(name, theirs, own_block(parameter))
                own.lerp_(theirs, share)

    def save_hf(self, path: str | Path, *, writes: bool) -> None:
        """Write a folder that `from_pretrained` loads. All ranks of a sharded model call this, and one of them writes,
        as one instance of a whole one does.
        """
        parameters = dict(self.model.named_parameters())
        shapes = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in parameters.items()}
        weights = ((name, _whole(x.detach())) for name, x in parameters.items())
        if writes:
            save_model(Path(path), self.model, shapes, weights)
        for _ in weights:  # the other ranks gather to the end
            pass


def _whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


def is_read_by_parts(config: FrozenConfig) -> bool:
    """Whether a model is to be made empty for such an engine: on a CPU a whole one is the file, mapped."""
    return config.is_collective or torch.cuda.is_available()


def open_frozen_policy(
    path: str | Path, config: FrozenConfig, attn_implementation: str | None = None
) -> FrozenEngine[nn.Module]:
    """A causal language model under such an engine; arguments as `load_policy` takes them."""
    model = load_policy(
        path,
        weight_type(config.precision),
        attn_implementation=attn_implementation,
        packing=config.packing,
        empty=is_read_by_parts(config),
    )
    return FrozenEngine(model, config)
