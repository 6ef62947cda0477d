"""The model that learns which answer is better."""

from functools import partial

import torch

from components.batch import Batch
from components.engines.causal import load_value_model, state_values
from components.engines.opening import open_engine
from components.engines.reward_model import note_statistics
from components.engines.train_engine import init_process_group
from core import BaseWorkload, rpc, trainer_invocation

from .. import remote_call
from ..algorithm import PAIR, at_the_end, loss
from ..config import RewardModelConfig


class Reward(BaseWorkload):
    """One rank of the model."""

    config: RewardModelConfig

    def setup(self) -> None:
        """Meet the other ranks before any library can make a process group of its own."""
        self.setup_process_group(init_process_group)

    @trainer_invocation
    def load(self, model_path: str, total_steps: int, pad_token_id: int) -> None:
        """Load the model, with a new head unless it has one, and put it under its optimizer."""
        config = self.config
        model = load_value_model(
            model_path,
            gradient_checkpointing=config.gradient_checkpointing,
            seed=config.seed,
            attn_implementation=config.attn_implementation,
            value_head_prefix=config.value_head_prefix,
            packing=config.packing_samples,
        )
        model.backbone.config.pad_token_id = pad_token_id
        self.engine = open_engine(model, config.engine(total_steps, torch.cuda.is_available()))

    @trainer_invocation(post_func=lambda metrics: metrics[0])
    def train_step(self, minibatch: Batch) -> dict[str, float]:
        """One optimizer step on the minibatch, of which every rank takes its share; send it with replicate."""
        own_loss = partial(loss, with_margin=self.config.margin_loss)
        return self.engine.train_step(minibatch, own_loss, group_size=PAIR)

    @trainer_invocation(post_func=Batch.concat)
    def score(self, answers: Batch) -> Batch:
        """`score` of each sequence; the batch is split over the ranks."""
        score_N = self.engine.forward(answers.only("tokens"), state_values)
        return Batch(answers.lengths, {}, {"score": at_the_end(score_N, answers)})

    @trainer_invocation
    def save_state(self, folder: str) -> None:
        """Write what training goes on from; all ranks write a part."""
        self.engine.save_state(f"{folder}/reward")

    @trainer_invocation(post_func=lambda notes: notes[0])
    def load_state(self, folder: str) -> list[str]:
        """Go on exactly where `save_state` was called; what cannot be exact is returned in words."""
        return self.engine.load_state(f"{folder}/reward")

    @trainer_invocation
    def save(self, path: str, mean: float, std: float) -> None:
        """Write a folder that `from_pretrained` loads, with what its scores are normalised by; rank 0 writes."""
        self.engine.save_hf(path)
        if self.rank == 0:
            note_statistics(path, mean, std)

    @rpc(remote_call.end_job)
    def end(self) -> None:
        """Nothing is held outside the process."""
