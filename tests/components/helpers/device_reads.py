"""A device that can be computed on and not read: torch's meta device, and a count of the calls that try to read it.

A GPU makes the host wait whenever a number or a shape depends on its results. Meta tensors have no results, so no such
call passes unnoticed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from components.train.config import TrainConfig
from components.train.engine import TrainEngine
from components.train.optimizer import adam_of
from plugins.fsdp.engine import FSDPEngine
from plugins.fsdp.optimizer import LocalAdamW

READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}


class DeviceReads(TorchFunctionMode):
    """Count the reads of meta tensors by name, and answer them with ones. Collectives over meta tensors do nothing.

    Calls whose result has a shape that depends on numbers, such as `nonzero` and boolean indices, raise an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.is_meta:
            if name == "all_reduce":
                return None
            if name in READS:
                self.counts[name] += 1
                return func(torch.ones(x.shape, dtype=x.dtype), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class MetaEngine(FSDPEngine):
    """FSDP's engine on the meta device, whose model is not sharded."""

    def __init__(self, model: torch.nn.Module, config: TrainConfig) -> None:
        TrainEngine.__init__(self, model, config)
        self.device = torch.device("meta")
        self.model.to(self.device)
        self._groups = []
        self.adam = adam_of(model, config, LocalAdamW)

    def _begin_pass(self, is_last: bool) -> None:
        pass


@contextlib.contextmanager
def counted_reads() -> Iterator[DeviceReads]:
    """Count the reads inside. The meta device has no autocast, which is off there."""
    is_enabled, autocast = torch.is_autocast_enabled, torch.autocast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda kind: kind != "meta" and is_enabled(kind))
        patch.setattr(torch, "autocast", lambda kind, **how: autocast("cpu" if kind == "meta" else kind, **how))
        with DeviceReads() as reads:
            yield reads
