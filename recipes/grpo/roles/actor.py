"""The policy that is trained."""

from torch import nn

from components.batch import Batch
from components.rl.aggregation import LossOutput, Totals
from training.roles.policy import PolicyWorker

from ..algorithm import policy_loss
from ..config import GRPOConfig


class Actor(PolicyWorker[GRPOConfig]):
    """One rank of the policy."""

    def loss(self, model: nn.Module, micro: Batch, totals: Totals) -> LossOutput:
        """The loss of one micro-batch, see algorithm.py."""
        return policy_loss(model, micro, totals, self.config)
