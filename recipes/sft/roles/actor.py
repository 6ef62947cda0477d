"""The model that learns."""

import torch

from components.batch import Batch
from components.engines.causal import load_policy, token_logprobs
from components.engines.opening import open_engine
from components.engines.train_engine import init_process_group
from core import BaseWorkload, rpc, trainer_invocation

from .. import remote_call
from ..algorithm import loss
from ..config import SFTConfig


class Actor(BaseWorkload):
    """One rank of the model."""

    config: SFTConfig

    def setup(self) -> None:
        """Meet the other ranks before any library can make a process group of its own."""
        self.setup_process_group(init_process_group)

    @trainer_invocation
    def load(self, model_path: str, total_steps: int) -> None:
        """Load the model and put it under its optimizer."""
        model = load_policy(model_path, gradient_checkpointing=self.config.gradient_checkpointing)
        self.engine = open_engine(model, self.config.engine(total_steps, torch.cuda.is_available()))

    @trainer_invocation(post_func=lambda metrics: metrics[0])
    def train_step(self, minibatch: Batch) -> dict[str, float]:
        """One optimizer step on the minibatch, of which every rank takes its share; send it with replicate."""
        return self.engine.train_step(minibatch, loss)

    @trainer_invocation(post_func=Batch.concat)
    def logprobs(self, demonstrations: Batch) -> Batch:
        """`logprob` per token; the batch is split over the ranks."""
        logprob_N = self.engine.forward(demonstrations, lambda model, micro: token_logprobs(model, micro).logprob_N)
        return Batch(demonstrations.lengths, {"logprob": logprob_N})

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
