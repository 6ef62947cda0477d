"""The role `actor`: the model that is trained."""

from torch import nn

from components.batch import Batch
from components.models.causal import token_logprobs
from components.rl.aggregation import LossOutput, Totals
from core import trainer_invocation
from training.roles.supervised import SupervisedModel

from ..algorithm import loss
from ..config import SFTConfig


class Actor(SupervisedModel[SFTConfig]):
    """One rank of the model. Its base class has the engine and the optimizer step."""

    def loss(self, model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        """Return the loss of one micro-batch; see algorithm.py."""
        return loss(model, micro, totals)

    @trainer_invocation(post_func=Batch.concat)
    def logprobs(self, demonstrations: Batch) -> Batch:
        """Return `logprob` [N] in nats, without gradients. The batch is split over the ranks."""
        logprob_N = self.engine.forward(demonstrations, lambda model, micro: token_logprobs(model, micro).logprob_N)
        return Batch(demonstrations.lengths, {"logprob": logprob_N})
