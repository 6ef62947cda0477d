"""Adapters: small tensors that are trained in front of weights which stay as they are. A plug-in provides them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from components.registry import load
from components.train.config import TrainConfig


class Adapters(Protocol):
    """The adapters of one model."""

    note: dict[str, Any]
    """Settings that a saved state has to agree with."""

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's two matrices."""
        ...

    def off(self) -> AbstractContextManager[None]:
        """Inside, passes are those of the model that training started from."""
        ...

    def named(self, trained: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Return the adapters among the trained tensors, by their names in files."""
        ...

    def merged(
        self, frozen: Iterable[tuple[str, Tensor]], trained: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Return the weights of the model without adapters that computes the same.

        Args:
            frozen: whole parameters that are not trained, by their names in the model; none on ranks other than 0.
            trained: whole parameters that are trained; none there too.
        """
        ...

    def save(self, folder: Path, trained: Mapping[str, Tensor]) -> None:
        """Write the adapters, for the model that training started from."""
        ...


def open_adapters(model: nn.Module, config: TrainConfig) -> Adapters | None:
    """Put adapters into `model`, in place, or return None if all weights are trained.

    Raises:
        ValueError: no plug-in provides adapters, or the options do not suit the model.
    """
    return load("adapters", "lora", "train.lora_rank")(model, config) if config.lora_rank else None
