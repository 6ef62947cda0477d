"""The value function that is trained."""

from functools import partial

from components.batch import Batch
from components.models.state_values import token_values
from components.models.value_model import load_value_model
from components.train.opening import open_engine
from core import rpc

from .. import remote_call
from ..algorithm import value_loss
from .learner import Learner


class Critic(Learner):
    """One rank of the critic."""

    @rpc(remote_call.critic_init)
    def init_model(self, model_path: str, steps: int) -> None:
        """Load the critic into the training engine."""
        options = self.config
        model = load_value_model(
            model_path,
            gradient_checkpointing=bool(options.train.gradient_checkpointing),
            seed=options.seed,
            attn_implementation=options.model.attn_implementation,
            packing=options.train.packing,
            value_head_prefix=options.reward_model.value_head_prefix,
            # A critic that starts from a reward model predicts rewards in the same normalised units.
            normalize=options.reward_model.normalize and options.critic_start in options.reward_model.paths,
            empty=True,
        )
        self.engine = open_engine(model, self.config.critic_engine(steps))

    @rpc(remote_call.critic_forward)
    def forward(self, samples: Batch) -> Batch:
        """Compute the value of the state before each token."""
        return Batch(samples.lengths, {"value": self.engine.forward(samples, token_values)})

    @rpc(remote_call.critic_update)
    def update(self, step: int) -> dict[str, float]:
        """Train on the experience."""
        return self.train_on_experience(partial(value_loss, config=self.config), step)
