"""The rollout engine `hf` with times of prefill, decoding, and the work on batches around them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from components.batch import Batch
from components.generate.config import HFRolloutConfig, SamplingConfig
from components.generate.hf_engine import HFRolloutEngine
from components.generate.times import GenerationTimes

if TYPE_CHECKING:
    from transformers import DynamicCache


class TimedHFEngine(HFRolloutEngine):
    """An hf engine that measures the parts of generation."""

    def __init__(self, model_path: str | Path, config: HFRolloutConfig | None = None) -> None:
        """See `HFRolloutEngine`."""
        super().__init__(model_path, config)
        self._times = GenerationTimes()

    def metrics(self) -> dict[str, float]:
        """See `RolloutEngine.metrics`."""
        return super().metrics() | self._times.take()

    def _generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        with self._times.generation(sampling):
            return super()._generate(prompts, sampling)

    def _generate_rows(self, prompts: Batch, sampling: SamplingConfig) -> Any:
        with self._times.measure("decode"):
            return super()._generate_rows(prompts, sampling)

    def prefill(self, prompts: Batch, max_new_tokens: int) -> tuple[DynamicCache, Tensor, Tensor | None]:
        with self._times.measure("prefill"):
            prefilled = super().prefill(prompts, max_new_tokens)
            # Kernels are queued. The first token waits for them in any case, so this costs nothing.
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        return prefilled
