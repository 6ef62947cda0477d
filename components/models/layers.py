"""Decoder layers of a model, the units in which engines shard it."""

from __future__ import annotations

from torch import nn


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: the modules whose classes transformers lists in `_no_split_modules`."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names and module is not model]
