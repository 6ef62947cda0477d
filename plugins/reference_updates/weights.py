"""Weights of a frozen model: interpolation towards another model, and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.models.disk.blocks import local_part, own_block
from components.models.disk.export import save_model
from components.models.disk.weight_files import WeightFiles
from components.train.frozen import FrozenEngine


def follow(engine: FrozenEngine[Any], policy: str, share: float, target: str, *, writes: bool) -> None:
    """Interpolate the weights of an engine towards those of a policy, and save the result.

    Args:
        engine: engine of a frozen model.
        policy: folder of the policy.
        share: weight of the policy in the result, from 0 to 1.
        target: folder that the result is saved to.
        writes: this process writes. Of a sharded model, all ranks must call this function and one of them writes.
    """
    mix(engine, policy, share)
    save(engine, target, writes=writes)


@torch.no_grad()
def mix(engine: FrozenEngine[Any], folder: str | Path, share: float) -> None:
    """Interpolate the weights towards those in a folder: (1 - share) * weights + share * weights in the folder.

    The result has the dtype of the weights. Each rank reads only its shard.

    Args:
        engine: engine of a frozen model.
        folder: path to a model of the same architecture.
        share: weight of the model in the folder, in [0, 1].
    """
    model: Any = engine.model
    with WeightFiles(model, Path(folder)) as files:
        for name, parameter in engine.model.named_parameters():
            shard = local_part(parameter.detach())
            target = torch.empty_like(shard)
            files.read(name, target, own_block(parameter))
            shard.lerp_(target, share)


def save(engine: FrozenEngine[Any], path: str | Path, *, writes: bool) -> None:
    """Write a folder that `from_pretrained` loads.

    Args:
        engine: engine of a frozen model.
        path: path to the folder.
        writes: this rank writes. Of a sharded model, all ranks must call this method and one of them writes.
    """
    parameters = dict(engine.model.named_parameters())
    shapes = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in parameters.items()}
    weights = ((name, _gathered(x.detach())) for name, x in parameters.items())
    if writes:
        save_model(Path(path), engine.model, shapes, weights)
    # Gathering is collective, so ranks that do not write must exhaust the iterator too.
    for _ in weights:
        pass


def _gathered(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()
