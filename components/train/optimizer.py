"""AdamW over the trained parameters of a model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW

from components.train.config import TrainConfig


def adam_of(model: nn.Module, config: TrainConfig, kind: type[AdamW] = AdamW) -> AdamW:
    """Return an AdamW optimizer of a class over the trained parameters of `model`."""
    return kind(
        _parameter_groups(model, config.weight_decay, config.weight_decay_all),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def _parameter_groups(model: nn.Module, weight_decay: float, is_for_all: bool) -> list[dict[str, Any]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weight_decay == 0 or is_for_all:
        return [{"params": parameters, "weight_decay": weight_decay}]
    # DeepSpeed's ZeRO 3 flattens parameters, and keeps their original shape in `ds_shape`.
    matrices = [parameter for parameter in parameters if len(getattr(parameter, "ds_shape", parameter.shape)) > 1]
    vectors = [parameter for parameter in parameters if len(getattr(parameter, "ds_shape", parameter.shape)) <= 1]
    # Vectors have no weight decay. A model without vectors has no such group.
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
