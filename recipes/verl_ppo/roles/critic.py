"""The value function that learns."""

from functools import partial

from components.batch import Batch
from components.engines.causal import load_value_model, token_values
from components.engines.opening import open_engine
from components.engines.train_engine import init_process_group
from core import BaseWorkload, Dispatch, register
from training.rollouts import keep_failed, over_updates

from ..algorithm import learnable, value_loss
from ..config import VerlPPOConfig


class CriticWorker(BaseWorkload):
    """One rank of the critic."""

    config: VerlPPOConfig

    def setup(self) -> None:
        """Meet the other ranks before any library can make a process group of its own."""
        self.setup_process_group(init_process_group)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self, model_path: str, steps: int) -> None:
        """Load the model, with a new value head where it has none, and start its training."""
        own = self.config.critic.model
        model = load_value_model(
            model_path,
            gradient_checkpointing=own.enable_gradient_checkpointing,
            seed=self.config.seed,
            attn_implementation=self.config.attn_implementation,
            packing=own.use_remove_padding,
        )
        self.engine = open_engine(model, self.config.critic_engine(steps))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_values(self, tokens: Batch) -> Batch:
        """`value` per token, of the state before it; the batch is split over the ranks."""
        return Batch(tokens.lengths, {"value": self.engine.forward(tokens, token_values)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_critic(self, experience: Batch, step: int) -> dict[str, float]:
        """Train on the step's answers; every rank is given all of them, as in `update_actor`."""
        history = []
        for _, minibatch in learnable(experience, self.config, "critic", step):
            try:
                history.append(self.engine.train_step(minibatch, partial(value_loss, config=self.config)))
            except FloatingPointError as error:
                where = keep_failed(self.config.run_dir, step, "critic", minibatch, self.rank)
                raise FloatingPointError(f"step {step}: {error}; {where}") from error
        return over_updates(history)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Write what training goes on from; all ranks write a part."""
        self.engine.save_state(f"{folder}/critic")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> list[str]:
        """Go on exactly where `save_checkpoint` was called; what cannot be exact is returned in words."""
        return self.engine.load_state(f"{folder}/critic")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_job(self) -> None:
        """Nothing is held outside the process."""
