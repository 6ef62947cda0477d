"""Routers of a mixture of experts, from the metadata of the model's class in transformers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Routers:
    """Modules of a model that choose experts. A dense model has none."""

    modules: list[nn.Module]
    index: int
    """Index of the router logits in a module's output, if that is a tuple."""


def find_routers(model: nn.Module) -> Routers:
    """Return the routers of a policy or value model."""
    recorders = [
        recorder
        for module in model.modules()
        if (recorder := (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")) is not None
    ]
    kinds = tuple({recorder.target_class for recorder in recorders})
    index = recorders[0].index if recorders else 0
    return Routers([module for module in model.modules() if isinstance(module, kinds)], index)
