"""A job with long responses, in which one engine runs out of memory."""

import itertools
import os
from pathlib import Path
from typing import Any

import torch

from components.batch import Batch
from components.generate.config import SamplingConfig
from core import BaseTrainer, trainer_invocation
from recipes.grpo.config import GRPOConfig
from training.roles.rollout import RolloutWorker

PROMPTS, TOKENS = 200, 90
LAST = 30
"""Number of a step of vLLM in the middle of a generation. Each step adds a token to some responses."""


class Engine(RolloutWorker):
    """Grpo's rollout role, which also returns its process id."""

    @trainer_invocation
    def pid(self) -> int:
        """Return the process id of this engine."""
        return os.getpid()

    @trainer_invocation
    def doom(self) -> None:
        """Simulate running out of memory in the middle of the next generation, if this is the first engine."""
        if self.rank > 0:
            return
        engine: Any = self.sampler
        vllm = engine._llm.llm_engine
        step, steps = vllm.step, itertools.count(1)

        def last_steps() -> Any:
            if next(steps) == LAST:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")
            return step()

        vllm.step = last_steps


class Disturbed(BaseTrainer):
    """Generates twice for the same prompts. In the middle of the second time an engine runs out of memory."""

    config: GRPOConfig

    def init(self) -> None:
        """Start the engines."""
        self.RG_ROLLOUT.load(self.config.model.path).result()

    def fit(self) -> None:
        """Save both batches in the run folder."""
        prompts = Batch.from_rows(
            {"tokens": [[4 + i % 9, 5, 6] for i in range(PROMPTS)]},
            {"prompt_id": list(range(PROMPTS)), "sample_id": [0] * PROMPTS},
        )
        sampling = SamplingConfig(max_new_tokens=TOKENS, temperature=2.0)
        folder = Path(self.config.run_dir)
        undisturbed: Batch = self.RG_ROLLOUT.generate(prompts, sampling)
        undisturbed.save(folder / "undisturbed.parquet")
        before: list[int] = self.RG_ROLLOUT.pid()
        self.RG_ROLLOUT.doom()
        disturbed: Batch = self.RG_ROLLOUT.generate(prompts, sampling)
        disturbed.save(folder / "disturbed.parquet")
        after: list[int] = self.RG_ROLLOUT.pid()
        assert after[0] != before[0], "the engine was not replaced"
        assert after[1] == before[1]
