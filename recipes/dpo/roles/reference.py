"""The frozen policy that the other is held to."""

from typing import Any

import torch

from components.batch import Batch
from components.engines.causal import evaluate, load_policy, token_logprobs
from core import BaseWorkload, rpc, trainer_invocation

from .. import remote_call
from ..algorithm import answer_logprobs
from ..config import DPOConfig


class Reference(BaseWorkload):
    """One instance of the reference."""

    config: DPOConfig

    @trainer_invocation(idempotent=True, replay="last")
    def load(self, model_path: str) -> None:
        """Load; nothing of it is ever trained."""
        config = self.config
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.engine = config.engine(1, self.device == "cuda")
        self.model: Any = load_policy(
            model_path,
            dtype="bfloat16" if self.engine.precision == "bf16" else "float32",
            attn_implementation=config.attn_implementation,
            packing=config.packing_samples,
        )
        self.model.to(self.device).eval().requires_grad_(False)

    @trainer_invocation(idempotent=True, post_func=Batch.concat)
    def logprobs(self, answers: Batch) -> Batch:
        """`logprob` of each answer; the batch is split over the instances."""
        logprob_N = evaluate(
            answers.only("tokens"),
            self.engine.max_tokens,
            self.device,
            lambda micro: token_logprobs(self.model, micro).logprob_N,
            self.engine.max_sequences,
            self.engine.packing,
        )
        return Batch(answers.lengths, {}, {"logprob": answer_logprobs(logprob_N, answers)})

    @trainer_invocation
    def release(self) -> None:
        """Give its memory back: everything has been asked."""
        del self.model
        if self.device == "cuda":
            torch.cuda.empty_cache()

    @rpc(remote_call.end_job, idempotent=True)
    def end(self) -> None:
        """Nothing is held outside the process."""
