"""The policy that learns, and the reference model before it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.engines.causal import evaluate, load_policy, token_logprobs
from components.rl.aggregation import LossOutput, Totals
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
        """Load a frozen model."""
        config = self.config
        dtype = "bfloat16" if config.train.precision == "bf16" else "float32"
        attention = config.model.attn_implementation
        model: Any = load_policy(model_path, dtype, attn_implementation=attention, packing=config.train.packing)
        self.reference = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    @trainer_invocation(post_func=Batch.concat)
    def reference_logprobs(self, responses: Batch) -> Batch:
        """`logprob` of each response under the reference model; the batch is split over its instances."""
        own, device = self.config.engine(1), self.reference.device
        compute = partial(_logprobs, self.reference)
        logprob_N = evaluate(responses.only("tokens"), own.max_tokens, device, compute, own.max_sequences, own.packing)
        return Batch(responses.lengths, {}, {"logprob": response_logprobs(logprob_N, responses)})

    @trainer_invocation
    def drop_reference(self) -> None:
        """Free the reference model; its memory is the policy's."""
        del self.reference
        torch.cuda.empty_cache()

    @trainer_invocation(post_func=Batch.concat)
    def logprobs(self, responses: Batch) -> Batch:
        """`logprob` of each response; the batch is split over the ranks."""
        logprob_N = self.engine.forward(responses.only("tokens"), _logprobs)
        return Batch(responses.lengths, {}, {"logprob": response_logprobs(logprob_N, responses)})


def _logprobs(model: nn.Module, micro: Batch) -> Tensor:
    return token_logprobs(model, micro).logprob_N
