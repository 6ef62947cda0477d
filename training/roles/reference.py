"""The reference model: the frozen policy that the KL is measured to."""

from typing import Any

import torch

from components.batch import Batch
from components.engines.causal import evaluate, load_policy, token_logprobs
from core import BaseWorkload, trainer_invocation
from training.rl_options import RLOptions


class ReferenceWorker(BaseWorkload):
    """One instance of the reference model."""

    config: RLOptions

    @trainer_invocation(blocking=False, idempotent=True, replay="last")
    def load(self, model_path: str) -> None:
        """Load; nothing of it is ever trained."""
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = load_policy(
            model_path,
            dtype=self.config.dtype,
            attn_implementation=self.config.model.attn_implementation,
            packing=self.config.train.packing,
        )
        self.model.to(self.device).eval().requires_grad_(False)

    @trainer_invocation(blocking=False, idempotent=True, post_func=Batch.concat)
    def logprobs(self, tokens: Batch) -> Batch:
        """`reference_logprob` per token, in nats, at the sampling temperature; split over the instances."""
        temperature = self.config.rollout.temperature
        max_tokens, max_sequences = self.config.forward_limits
        logprob_N = evaluate(
            tokens,
            max_tokens,
            self.device,
            lambda micro: token_logprobs(self.model, micro, temperature).logprob_N,
            max_sequences,
            self.config.train.packing,
        )
        return Batch(tokens.lengths, {"reference_logprob": logprob_N})
