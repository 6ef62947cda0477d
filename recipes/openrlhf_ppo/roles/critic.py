"""The value function that learns."""

from functools import partial

from components.batch import Batch
from components.engines.causal import load_value_model, token_values
from core import rpc

from .. import remote_call
from ..algorithm import value_loss
from .learner import Learner


class Critic(Learner):
    """One rank of the critic."""

    @rpc(remote_call.critic_init)
    def init_model(self, model_path: str, steps: int) -> None:
        """Load and start training."""
        config = self.config
        model = load_value_model(
            model_path,
            gradient_checkpointing=config.gradient_checkpointing,
            seed=config.seed,
            attn_implementation=config.attn_implementation,
            packing=config.packing_samples,
            value_head_prefix=config.value_head_prefix,
            # The critic predicts what the reward model's rewards are normalised to.
            normalize=config.normalize_reward and config.critic_start in config.reward_models,
        )
        self.start_engine(model, self.config.critic_learning_rate, steps)

    @rpc(remote_call.critic_forward)
    def forward(self, samples: Batch) -> Batch:
        """Values of the states before each token."""
        return Batch(samples.lengths, {"value": self.engine.forward(samples, token_values)})

    @rpc(remote_call.append_experience)
    def append(self, experience: Batch) -> None:
        """Keep the step's batch for the update."""
        self.experience = experience

    @rpc(remote_call.critic_update)
    def update(self, step: int) -> dict[str, float]:
        """Train on it."""
        return self.fit(partial(value_loss, config=self.config), step)

    @rpc(remote_call.save_value_model)
    def save(self, path: str) -> None:
        """Rank 0 writes what all ranks gather."""
        self.engine.save_hf(path)

    @rpc(remote_call.end_job)
    def end(self) -> None:
        """Nothing is held outside the process."""
