"""The role `actor`: the policy that is trained."""

from torch import nn

from components.batch import Batch
from components.rl.aggregation import LossOutput, Totals
from training.roles.policy import PolicyWorker

from ..algorithm import policy_loss
from ..config import MultiTurnConfig


class Actor(PolicyWorker[MultiTurnConfig]):
    """One rank of the policy. Its base class has the engine, the update and the weight sync."""

    def loss(self, model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        """Return the loss of one micro-batch; see algorithm.py."""
        return policy_loss(model, micro, totals, self.config)
