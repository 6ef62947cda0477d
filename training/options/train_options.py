"""Options of the training engine, whose errors are reported together with those of all other options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from components.ranges import out_of_range
from components.train.config import TrainOptions
from training.options.schema import refuse


@dataclass(frozen=True, kw_only=True)
class LearnerOptions(TrainOptions):
    """Options of the training engine. Their errors are reported together with those of all other options."""

    GROUP: ClassVar[str] = "train"

    def __post_init__(self) -> None:
        refuse(out_of_range(self, f"{self.GROUP}."))
        refuse([*self.read_adapters(f"{self.GROUP}."), *self.faults(f"{self.GROUP}.")])
