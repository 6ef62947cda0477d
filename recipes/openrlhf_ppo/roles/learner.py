"""Base class of actor and critic: holds the step's experience and trains on it."""

from components.batch import Batch
from components.train.engine import LossFunction
from core import rpc
from training.roles.trained_model import Prepare, TrainedModel

from .. import remote_call
from ..config import PPOConfig


class Learner(TrainedModel):
    """A rank that trains one model."""

    config: PPOConfig
    experience: Batch | None = None

    @rpc(remote_call.append_experience)
    def append(self, experience: Batch) -> None:
        """Keep the step's batch for the update."""
        self.experience = experience

    def train_on_experience(self, loss: LossFunction, step: int, prepare: Prepare | None = None) -> dict[str, float]:
        """Train on the experience and release it; see `TrainedModel.train_epochs`."""
        if self.experience is None:
            raise ValueError(f"{self.name} was asked to train on step {step} before it was given its experience")
        metrics = self.train_epochs(self.experience, step, loss, prepare)
        self.experience = None
        return metrics
