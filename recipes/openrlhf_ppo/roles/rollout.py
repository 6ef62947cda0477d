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
        """Load the initial policy."""
        # Not `load`: the reward role computes the rewards, so that they are not computed here.
        self.open_sampler(model_path)

    @rpc(remote_call.generate_samples, idempotent=True)
    def generate_parts(self, prompts: list[Batch], sampling: SamplingConfig) -> list[Batch]:
        """Sample one response or episode per prompt. The lists have one batch per engine."""
        return [self.generate(part, sampling) for part in prompts]
