"""Creation of the training engine that a configuration names. An engine is imported only when it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.registry import load
from components.train.config import TrainConfig

if TYPE_CHECKING:
    from torch import nn

    from components.train.engine import TrainEngine


def open_engine(model: nn.Module, config: TrainConfig) -> TrainEngine:
    """Return the training engine that `config.engine` names. All ranks must call this with the same weights.

    A plug-in provides the class of its engine as the `train engine` of that name.

    Args:
        model: model to train, which is sharded and cast (bf16) in place. If it was created empty, the engine reads its
            weights.
        config: configuration of the engine.
    """
    return load("train engine", config.engine, "train.engine")(model, config)
