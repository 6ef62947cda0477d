"""The frozen policy that the KL is measured to."""

from typing import Any

import torch

from components.batch import Batch
from components.engines.causal import evaluate, load_policy, token_logprobs
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
        self.device = "cuda" if has_gpu else "cpu"
        self.model: Any = load_policy(model_path, dtype=self.config.rollout_engine(has_gpu).dtype)
        self.model.to(self.device).eval().requires_grad_(False)

    @rpc(remote_call.reference_forward)
    def forward(self, samples: Batch) -> Batch:
        """Log-probabilities at the sampling temperature."""
        logprob_N = evaluate(
            samples,
            self.config.max_tokens_per_gpu,
            self.device,
            lambda micro: token_logprobs(self.model, micro, self.config.temperature).logprob_N,
        )
        return Batch(samples.lengths, {"reference_logprob": logprob_N})

    @rpc(remote_call.end_job)
    def end(self) -> None:
        """Nothing is held outside the process."""
