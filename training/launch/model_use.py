"""Models that the roles of a run hold. A recipe describes them for the plan of a run."""

from __future__ import annotations

from dataclasses import dataclass

from components.generate.config import RolloutConfig
from components.models.size import ModelSize, model_size
from components.registry import load
from components.train.config import FrozenConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """A model that each process of a role holds, and its use."""

    role: str
    path: str
    """Path of the model, as the recipe receives it."""
    config: TrainConfig | FrozenConfig | RolloutConfig
    """The engine, which determines the use: the model is trained, evaluated, or sampled from."""
    sequences: int
    """Number of sequences of an optimizer step, of a request to a frozen model, or of the responses of a step. All
    processes of the role share them."""
    has_head: bool = True
    """True if the model has an output layer over the vocabulary. Critics and reward models have none."""
    publishes: bool = False
    """True if rank 0 publishes the weights to engines that sample."""
    sleeps: bool = False
    """True if the model is moved to host memory while other roles work."""

    def check(self, ranks: int) -> None:
        """Check that the ranks of the role can train the model with the axes of the configuration.

        Raises:
            ValueError: an axis does not divide the ranks, or the heads or experts of the model.
        """
        if not isinstance(self.config, TrainConfig):
            return
        size = model_size(self.path)
        if size is not None:
            check_axes(size, self.config)
        self.config.data_ranks(ranks)


def check_axes(size: ModelSize, config: TrainConfig) -> None:
    """Check that the axes of a training engine divide a model.

    Raises:
        ValueError: the number of attention heads or experts is not divisible. The message says what to set.
    """
    if max(config.context, config.tensor, config.expert) > 1:
        load("parallelism check", "model", "parallel")(size, config)
