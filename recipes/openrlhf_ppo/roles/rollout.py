"""The engine that samples from the policy."""

from components.batch import Batch
from components.engines.config import SamplingConfig
from components.engines.hf_engine import HFRolloutEngine
from components.engines.weight_sync import WeightHandle
from core import BaseWorkload, rpc

from .. import remote_call
from ..config import PPOConfig


class Rollout(BaseWorkload):
    """One engine."""

    config: PPOConfig

    @rpc(remote_call.rollout_init, idempotent=True, replay="last")
    def init_model(self, model_path: str) -> None:
        """Load the policy as it is at the start."""
        self.engine = HFRolloutEngine(model_path, self.config.rollout_engine())

    @rpc(remote_call.generate_samples, idempotent=True)
    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """One answer per prompt."""
        return self.engine.generate(prompts, sampling)

    @rpc(remote_call.receive_weights, idempotent=True, replay="last")
    def receive(self, handle: WeightHandle) -> None:
        """Sample from newer weights from here on."""
        self.engine.receive(handle)

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """Nothing is held outside the process."""
