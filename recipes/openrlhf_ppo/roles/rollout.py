"""The engine that samples from the policy."""

from agents.runner import Collected
from components.batch import Batch
from components.engines.config import SamplingConfig
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

    @rpc(remote_call.begin_samples, idempotent=True)
    def begin_parts(self, prompts: list[Batch | None], sampling: SamplingConfig) -> list[None]:
        """Begin responses that `collect_finished` brings; the list has an item for every engine."""
        return [self.begin([mine], sampling) for mine in prompts]

    @rpc(remote_call.collect_samples, idempotent=True)
    def collect_finished(self, seconds: float) -> Collected:
        """Continue what has begun, until a group has finished or the time is over."""
        return self.collect(seconds)
