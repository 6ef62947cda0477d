"""What the policy and the critic have in common."""

from core import Dispatch, register
from training.roles.trained_model import TrainedModel

from ..config import VerlPPOConfig


class Learner(TrainedModel):
    """One rank of a model that is trained."""

    config: VerlPPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    def end_job(self) -> None:
        """Nothing is held outside the process."""
