"""Interface of adapters: small trained tensors beside frozen weights. A plug-in provides them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from components.registry import load
from components.train.config import TrainConfig


class Adapters(Protocol):
    """Adapters of one model."""

    note: dict[str, Any]
    """Settings that must be equal in a saved state and in the engine that loads it."""

    @property
    def scale(self) -> float:
        """Scale of the product of an adapter's two matrices."""
        ...

    def disabled(self) -> AbstractContextManager[None]:
        """Return a context manager that disables the adapters: passes are those of the model before training."""
        ...

    def named(self, trained: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters among the trained tensors, by their names in peft's files."""
        ...

    def merged(
        self, frozen: Iterable[tuple[str, Tensor]], trained: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the equivalent model without adapters: the adapters are merged into the weights.

        Args:
            frozen: whole frozen parameters by their names in the model. Empty on ranks other than 0.
            trained: whole trained parameters. Empty on ranks other than 0.
        """
        ...

    def save(self, folder: Path, trained: Mapping[str, Tensor]) -> None:
        """Write the adapters to a folder, for use with the model that training started from."""
        ...


def open_adapters(model: nn.Module, config: TrainConfig) -> Adapters | None:
    """Insert adapters into `model` in place and return them, or return None if all weights are trained.

    Raises:
        ValueError: no plug-in provides adapters, or the options do not fit the model.
    """
    return load("adapters", "lora", "train.lora_rank")(model, config) if config.lora_rank else None
