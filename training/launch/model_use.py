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

    def check(self, ranks: int, on_gpu: bool) -> list[str]:
        """Check that the ranks of the role can train the model with the axes and the kernels of the configuration.

        Returns:
            The choice of `train.kernels` with its reason. Empty for plain kernels.

        Raises:
            ValueError: an axis does not divide the ranks, or the heads or experts of the model; or the requested
                kernels cannot run.
        """
        if not isinstance(self.config, TrainConfig):
            return []
        check_axes(model_size(self.path), self.config)
        self.config.data_ranks(ranks)
        if self.config.kernels == "plain":
            return []
        return [load("training kernels", "choice", "train.kernels")(self.config.kernels, self.path, on_gpu)]


def check_axes(size: ModelSize | None, config: TrainConfig) -> None:
    """Check that the axes of a training engine divide a model, if its size is known.

    Raises:
        ValueError: the number of attention heads or experts is not divisible. The message says what to set.
    """
    if size is not None and max(config.context, config.tensor, config.expert) > 1:
        load("parallelism check", "model", "parallel")(size, config)
