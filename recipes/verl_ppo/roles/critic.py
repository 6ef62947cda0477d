"""The value function."""

from functools import partial

from components.batch import Batch
from components.models.state_values import token_values
from components.models.value_model import load_value_model
from components.train.opening import open_engine
from core import Dispatch, register
from training.roles.trained_model import TrainedModel

from ..algorithm import minibatches, value_loss
from ..config import VerlPPOConfig


class CriticWorker(TrainedModel):
    """One rank of the critic."""

    config: VerlPPOConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self, model_path: str, steps: int) -> None:
        """Load the model into the training engine, with a new value head if it has none."""
        model = load_value_model(
            model_path,
            gradient_checkpointing=self.config.critic.gradient_checkpointing,
            seed=self.config.seed,
            attn_implementation=self.config.model.attn_implementation,
            packing=self.config.critic.packing,
            empty=True,
        )
        self.engine = open_engine(model, self.config.engine("critic", steps))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_values(self, tokens: Batch) -> Batch:
        """Compute `value` per token, of the state before it. The batch is split over the ranks."""
        return Batch(tokens.lengths, {"value": self.engine.forward(tokens, token_values)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_critic(self, experience: Batch, step: int) -> dict[str, float]:
        """Train on all responses of a step. Return metrics, which are the same on every rank."""
        updates = minibatches(experience, self.config, "critic", step)
        return self.train(experience, step, updates, partial(value_loss, config=self.config))
