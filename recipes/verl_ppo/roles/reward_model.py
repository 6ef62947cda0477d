"""The reward model."""

import torch

from components.batch import Batch
from components.engines.reward_model import RewardModel
from core import BaseWorkload, Dispatch, register

from ..config import VerlPPOConfig


class RewardModelWorker(BaseWorkload):
    """One instance of an AutoModelForSequenceClassification with one label."""

    config: VerlPPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, idempotent=True, replay="last")
    def init_model(self, model_path: str) -> None:
        """Load; nothing of it is ever trained."""
        own = self.config.reward
        self.model = RewardModel(
            model_path,
            dtype=self.config.dtype,
            attn_implementation=self.config.model.attn_implementation,
            max_tokens=own.model_max_tokens,
            max_sequences=own.model_micro_batch_size or 0,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, idempotent=True)
    def compute_rm_score(self, tokens: Batch) -> Batch:
        """`rm_score` per response, of prompt and response as one sequence; split over the instances."""
        return Batch(tokens.lengths, {}, {"rm_score": self.model.score(tokens).to(torch.float32)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    def end_job(self) -> None:
        """Nothing is held outside the process."""
