"""Routers of a mixture of experts, from the metadata of the model's class in transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

ROUTES = "routes_"
"""Prefix of the columns of a batch with the experts of each token; see plugins/routing_replay/routes.py."""


@dataclass(frozen=True)
class Routers:
    """Modules of a model that choose experts. A dense model has none."""

    modules: list[nn.Module]
    index: int
    """Index of the router logits in a module's output, if that is a tuple."""


def find_routers(model: nn.Module) -> Routers:
    """Return the routers of a policy or value model."""
    # Architectures of transformers name the class of their routers in this attribute.
    recorders = [
        recorder
        for module in model.modules()
        if (recorder := (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")) is not None
    ]
    kinds = tuple({recorder.target_class for recorder in recorders})
    index = next((recorder.index for recorder in recorders), 0)
    return Routers([module for module in model.modules() if isinstance(module, kinds)], index)


def route_columns(names: Iterable[str]) -> list[str]:
    """Return the names of the columns that hold routes."""
    return [name for name in names if name.startswith(ROUTES)]
