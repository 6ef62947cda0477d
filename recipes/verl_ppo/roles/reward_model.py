"""The reward model."""

import torch

from components.batch import Batch
from components.models.reward_model import RewardModel
from core import Dispatch, register
from training.roles.frozen import FrozenRank, FrozenWorker

from ..config import VerlPPOConfig


class RewardModelWorker(FrozenWorker):
    """One instance of an AutoModelForSequenceClassification with one label."""

    config: VerlPPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, idempotent=True, replay="last")
    def init_model(self, model_path: str) -> None:
        """Load the model. It is not trained."""
        attention = self.config.model.attn_implementation
        self.model = RewardModel(model_path, self.config.reward_engine, attn_implementation=attention)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, idempotent=True)
    def compute_rm_score(self, tokens: Batch) -> Batch:
        """Compute `rm_score` per response, of prompt and response as one sequence. The instances split the batch."""
        return Batch(tokens.lengths, {}, {"rm_score": self.model.score(tokens).to(torch.float32)})


class RewardModelRank(FrozenRank, RewardModelWorker):
    """One rank of a sharded reward model."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_rm_score(self, tokens: Batch) -> Batch:
        """See `RewardModelWorker`. Each rank receives a part of the batch."""
        return super().compute_rm_score(tokens)
