"""The frozen policy that the KL is measured to."""

import torch

from components.batch import Batch
from components.engines.causal import load_policy, token_logprobs
from components.engines.forward import ForwardEngine
from core import BaseWorkload, rpc

from .. import remote_call
from ..config import PPOConfig


class Reference(BaseWorkload):
    """One instance of the reference."""

    config: PPOConfig

    @rpc(remote_call.reference_init)
    def init_model(self, model_path: str) -> None:
        """Load; nothing of it is ever trained."""
        has_gpu = torch.cuda.is_available()
        dtype = self.config.rollout_engine(has_gpu).dtype
        self.engine = ForwardEngine(load_policy(model_path, dtype=dtype), self.config.max_tokens_per_gpu)

    @rpc(remote_call.reference_forward)
    def forward(self, samples: Batch) -> Batch:
        """Log-probabilities at the sampling temperature."""
        logprob_N = self.engine.forward(
            samples, lambda model, micro: token_logprobs(model, micro, self.config.temperature).logprob_N
        )
        return Batch(samples.lengths, {"reference_logprob": logprob_N})

    @rpc(remote_call.end_job)
    def end(self) -> None:
        """Nothing is held outside the process."""
