"""Records of the runs of option_cases.py, shared by several tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.components.helpers import option_cases as options
from tests.components.helpers.ranks import run_ranks


class Runs:
    """Records of the ranks. Each run starts when a test first requests it."""

    def __init__(self, root: Path, model: Path, other_model: Path) -> None:
        self.root = root
        self._model = str(model)
        self._other_model = str(other_model)
        self._records: dict[str, list[dict[str, Any]]] = {}

    def _run(self, work: Callable[..., Any], world_size: int, *arguments: object) -> list[dict[str, Any]]:
        name = f"{work.__name__}{world_size}"
        if name not in self._records:
            self._records[name] = run_ranks(work, world_size, self.root / name, self._model, *arguments)
        return self._records[name]

    def states(self, world_size: int) -> Path:
        return self.root / "states" / str(world_size)

    def saved_models(self, world_size: int) -> Path:
        return self.root / "models" / str(world_size)

    def lora(self, world_size: int) -> list[dict[str, Any]]:
        return self._run(options.lora, world_size, self.saved_models(world_size))

    def resumed(self, world_size: int) -> list[dict[str, Any]]:
        return self._run(options.resumed, world_size, self.states(world_size), self.saved_models(world_size))

    def asleep(self, world_size: int) -> list[dict[str, Any]]:
        return self._run(options.asleep, world_size)

    def cast(self) -> dict[str, Any]:
        return self._run(options.cast, 1)[0]

    def crossed(self) -> dict[str, Any]:
        """Record of one rank that loads the state of two ranks."""
        self.resumed(2)
        return self._run(options.crossed, 1, self.states(2))[0]

    def refused(self) -> dict[str, Any]:
        self.resumed(1)
        return self._run(options.refused, 1, self._other_model, self.states(1))[0]


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
