"""The policy that learns, and the reference model before it."""

import torch
from torch import nn

from components.batch import Batch
from components.models.causal import policy_logprobs
from components.rl.aggregation import LossOutput, Totals
from components.train.config import FrozenConfig
from components.train.frozen import open_frozen_policy
from core import trainer_invocation
from training.roles.supervised import SupervisedModel

from ..algorithm import loss, response_logprobs
from ..config import DPOConfig


class Actor(SupervisedModel[DPOConfig]):
    """One rank of the policy; before it, for a moment, one instance of the reference model."""

    def loss(self, model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        """The loss of one micro-batch, see algorithm.py."""
        return loss(model, micro, totals, self.config)

    @trainer_invocation
    def load_reference(self, model_path: str) -> None:
        """Load a frozen model, sharded over the ranks where the policy is."""
        train = self.config.engine(1)
        layout = "sharded" if train.stage == 3 else "whole"
        limits, packing = train.forward_limits, train.packing
        own = FrozenConfig(precision=train.precision, limits=limits, packing=packing, layout=layout)
        self.reference = open_frozen_policy(model_path, own, self.config.model.attn_implementation)

    @trainer_invocation(post_func=Batch.concat)
    def reference_logprobs(self, responses: Batch) -> Batch:
        """`logprob` of each response under the reference model; the batch is split over its instances."""
        logprob_N = self.reference.forward(responses.only("tokens"), policy_logprobs)
        return Batch(responses.lengths, {}, {"logprob": response_logprobs(logprob_N, responses)})

    @trainer_invocation
    def drop_reference(self) -> None:
        """Free the reference model; its memory is the policy's."""
        del self.reference
        torch.cuda.empty_cache()

    @trainer_invocation(post_func=Batch.concat)
    def logprobs(self, responses: Batch) -> Batch:
        """`logprob` of each response; the batch is split over the ranks."""
        logprob_N = self.engine.forward(responses.only("tokens"), policy_logprobs)
        return Batch(responses.lengths, {}, {"logprob": response_logprobs(logprob_N, responses)})
