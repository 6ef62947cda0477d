"""The policy that learns."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from components.batch import Batch
from components.engines.causal import evaluate, load_policy, token_logprobs
from components.engines.opening import open_engine
from components.engines.train_engine import init_process_group
from core import BaseWorkload, rpc, trainer_invocation

from .. import remote_call
from ..algorithm import PAIR, answer_logprobs, loss
from ..config import DPOConfig


class Actor(BaseWorkload):
    """One rank of the policy; before it, for a moment, one instance of the reference."""

    config: DPOConfig

    def setup(self) -> None:
        """Meet the other ranks before any library can make a process group of its own."""
        self.setup_process_group(init_process_group)

    @trainer_invocation
    def load_reference(self, model_path: str) -> None:
        """Load a frozen model."""
        own, has_gpu = self.config, torch.cuda.is_available()
        dtype = "bfloat16" if own.engine(1, has_gpu).precision == "bf16" else "float32"
        model: Any = load_policy(
            model_path, dtype, attn_implementation=own.attn_implementation, packing=own.packing_samples
        )
        self.reference = model.to("cuda" if has_gpu else "cpu").eval()

    @trainer_invocation(post_func=Batch.concat)
    def reference_logprobs(self, answers: Batch) -> Batch:
        """`logprob` of each answer under the frozen model; the batch is split over the ranks."""
        own, device = self.config.engine(1, torch.cuda.is_available()), self.reference.device
        compute = partial(_logprobs, self.reference)
        logprob_N = evaluate(answers.only("tokens"), own.max_tokens, device, compute, own.max_sequences, own.packing)
        return Batch(answers.lengths, {}, {"logprob": answer_logprobs(logprob_N, answers)})

    @trainer_invocation
    def drop_reference(self) -> None:
        """Let the frozen model leave; its memory is the policy's."""
        del self.reference
        torch.cuda.empty_cache()

    @trainer_invocation
    def load(self, model_path: str, total_steps: int) -> None:
        """Load the model and put it under its optimizer."""
        config = self.config
        model = load_policy(
            model_path,
            gradient_checkpointing=config.gradient_checkpointing,
            attn_implementation=config.attn_implementation,
            packing=config.packing_samples,
        )
        self.engine = open_engine(model, config.engine(total_steps, torch.cuda.is_available()))

    @trainer_invocation(post_func=lambda metrics: metrics[0])
    def train_step(self, minibatch: Batch) -> dict[str, float]:
        """One optimizer step on the minibatch, of which every rank takes its share; send it with replicate."""
        return self.engine.train_step(minibatch, partial(loss, config=self.config), group_size=PAIR)

    @trainer_invocation(post_func=Batch.concat)
    def logprobs(self, answers: Batch) -> Batch:
        """`logprob` of each answer; the batch is split over the ranks."""
        logprob_N = self.engine.forward(answers.only("tokens"), _logprobs)
        return Batch(answers.lengths, {}, {"logprob": answer_logprobs(logprob_N, answers)})

    @trainer_invocation
    def save_state(self, folder: str) -> None:
        """Write what training goes on from; all ranks write a part."""
        self.engine.save_state(f"{folder}/actor")

    @trainer_invocation(post_func=lambda notes: notes[0])
    def load_state(self, folder: str) -> list[str]:
        """Go on exactly where `save_state` was called; what cannot be exact is returned in words."""
        return self.engine.load_state(f"{folder}/actor")

    @trainer_invocation
    def save(self, path: str) -> None:
        """Write a folder that `from_pretrained` loads; rank 0 writes what all ranks gather."""
        self.engine.save_hf(path)

    @rpc(remote_call.end_job)
    def end(self) -> None:
        """Nothing is held outside the process."""


def _logprobs(model: nn.Module, micro: Batch) -> Tensor:
    return token_logprobs(model, micro).logprob_N
