"""The engine that samples from the policy."""

from components.batch import Batch
from components.engines.config import SamplingConfig
from components.engines.hf_engine import HFRolloutEngine
from components.engines.weight_sync import WeightHandle
from core import BaseWorkload, rpc, trainer_invocation

from .. import remote_call
from ..config import ReinforceConfig


class Rollout(BaseWorkload):
    """One engine."""

    config: ReinforceConfig

    @trainer_invocation(blocking=False, idempotent=True, replay="last")
    def load(self, model_path: str) -> None:
        """Load the policy as it is at the start."""
        self.engine = HFRolloutEngine(model_path, self.config.rollout_engine())

    @trainer_invocation(idempotent=True, post_func=Batch.concat)
    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """One answer per prompt; the prompts are split over the engines.

        Returns:
            tokens, action_mask and rollout_logprob per token; prompt_length, truncated, weight_version per answer.
        """
        return self.engine.generate(prompts, sampling)

    @rpc(remote_call.receive_weights, idempotent=True, replay="last")
    def receive(self, handle: WeightHandle) -> None:
        """Sample from newer weights from here on."""
        self.engine.receive(handle)
