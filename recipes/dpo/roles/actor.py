"""The role `actor`: the policy that is trained, and the reference model before it."""

import torch
from torch import nn

from components.batch import Batch
from components.models.causal import policy_logprobs
from components.rl.aggregation import LossOutput, Totals
from components.train.config import FrozenConfig
from components.train.frozen import open_frozen_policy
from core import trainer_invocation
from training.roles.supervised import SupervisedModel
from training.roles.trained_model import of_rank0

from ..algorithm import loss, response_logprobs
from ..config import DPOConfig


class Actor(SupervisedModel[DPOConfig]):
    """One rank of the policy. Before the policy is loaded, it holds the reference model."""

    def loss(self, model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        """Return the loss of one micro-batch; see algorithm.py."""
        return loss(model, micro, totals, self.config)

    @trainer_invocation(post_func=of_rank0)
    def train_step(self, minibatch: Batch) -> dict[str, float]:
        """See `SupervisedModel.train_step`. A response of KTO is trained alone, the responses of a pair together."""
        metrics = self.engine.train_step(minibatch, self.loss, group_size=self.config.group_size)
        self.record_weights(self.engine.step_count)
        return metrics

    @trainer_invocation
    def load_reference(self, model_path: str) -> None:
        """Load the frozen reference model, sharded over the ranks if the policy will be (ZeRO 3)."""
        train = self.config.engine(1)
        layout = "whole"
        if train.stage == 3:
            layout = "sharded"
        frozen = FrozenConfig(
            precision=train.precision,  # as the policy: implicit rewards then start at exactly 0
            limits=train.forward_limits,
            packing=train.packing,
            layout=layout,
        )
        self.reference = open_frozen_policy(model_path, frozen, self.config.model.attn_implementation)

    @trainer_invocation(post_func=Batch.concat)
    def reference_logprobs(self, responses: Batch) -> Batch:
        """Return `logprob` [B] of each response under the reference model. The batch is split over the ranks."""
        logprob_N = self.reference.forward(responses.only("tokens"), policy_logprobs)
        return Batch(responses.lengths, {}, {"logprob": response_logprobs(logprob_N, responses)})

    @trainer_invocation
    def drop_reference(self) -> None:
        """Free the reference model and its device memory."""
        del self.reference
        torch.cuda.empty_cache()  # otherwise the allocator keeps the blocks, and the policy may not fit

    @trainer_invocation(post_func=Batch.concat)
    def logprobs(self, responses: Batch) -> Batch:
        """Return `logprob` [B] of each response under the policy. The batch is split over the ranks."""
        logprob_N = self.engine.forward(responses.only("tokens"), policy_logprobs)
        return Batch(responses.lengths, {}, {"logprob": response_logprobs(logprob_N, responses)})
