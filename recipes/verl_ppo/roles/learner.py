"""What the policy and the critic have in common."""

from core import Dispatch, register
from training.roles.trained_model import TrainedModel

from ..config import VerlPPOConfig


class Learner(TrainedModel):
    """One rank of a model that is trained."""

    config: VerlPPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Write what training resumes from; all ranks write a part."""
        self.save_state(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> list[str]:
        """Resume exactly where `save_checkpoint` was called; what cannot be exact is returned in words."""
        return self.load_state(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    def end_job(self) -> None:
        """Nothing is held outside the process."""
