"""The engine that samples from the policy."""

from components.batch import Batch
from components.generate.config import SamplingConfig
from core import rpc
from training.roles.rollout import RolloutWorker

from .. import remote_call


class Rollout(RolloutWorker):
    """One engine."""

    @rpc(remote_call.rollout_init, idempotent=True, replay="last")
    def init_model(self, model_path: str) -> None:
        """Load the policy as it is at the start."""
        self.load(model_path)

    @rpc(remote_call.generate_samples, idempotent=True)
    def generate_parts(self, prompts: list[Batch], sampling: SamplingConfig) -> list[Batch]:
        """One response or episode per prompt; the list has an item for every engine."""
        return [self.generate(mine, sampling) for mine in prompts]
