"""Options of the training engine, whose errors are reported together with those of all other options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from components.ranges import out_of_range
from components.train.config import TrainConfig, TrainOptions, choose_precision
from training.options.schema import refuse


@dataclass(frozen=True, kw_only=True)
class LearnerOptions(TrainOptions):
    """Options of the training engine. Their errors are reported together with those of all other options."""

    GROUP: ClassVar[str] = "train"

    def __post_init__(self) -> None:
        refuse(out_of_range(self, f"{self.GROUP}."))
        refuse([*self.read_adapters(f"{self.GROUP}."), *self.faults(f"{self.GROUP}.")])

    def resolved(self, gpus: int) -> Self:
        """Return the options with all automatic values resolved.

        On GPUs the values that are set here need the least memory. The plan replaces them by faster ones if it knows
        that these fit (`training.launch.plan.Choose`).

        Args:
            gpus: number of GPUs of each machine.
        """
        stage = 3 if gpus else TrainConfig.zero_stage
        # Only options that the user has not set: a value of the user must never be replaced by one of the machine.
        values = {"zero_stage": stage, "max_tokens": TrainConfig.max_tokens, "gradient_checkpointing": gpus > 0}
        unset = {name: value for name, value in values.items() if getattr(self, name) is None}
        return replace(self, precision=choose_precision(self.precision, gpus), **unset)
