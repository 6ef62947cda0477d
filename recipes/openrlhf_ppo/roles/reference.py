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

    @rpc(remote_call.reference_init, idempotent=True, replay="last")
    def init_model(self, model_path: str) -> None:
        """Load; nothing of it is ever trained."""
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = load_policy(
            model_path,
            dtype=self.config.dtype,
            attn_implementation=self.config.attn_implementation,
            packing=self.config.packing_samples,
        )
        self.model.to(self.device).eval().requires_grad_(False)

    @rpc(remote_call.reference_forward, idempotent=True)
    def forward(self, samples: Batch) -> Batch:
        """Log-probabilities at the sampling temperature."""
        max_tokens, max_sequences = self.config.forward_limits
        logprob_N = evaluate(
            samples,
            max_tokens,
            self.device,
            lambda micro: token_logprobs(self.model, micro, self.config.temperature).logprob_N,
            max_sequences,
            self.config.packing_samples,
        )
        return Batch(samples.lengths, {"reference_logprob": logprob_N})

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """Nothing is held outside the process."""
