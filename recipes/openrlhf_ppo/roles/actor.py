"""The policy that is trained."""

from functools import partial

from components.batch import Batch
from core import rpc
from training.roles.policy import PolicyWorker
from training.roles.ppo_loss import mark_tokens

from .. import remote_call
from ..algorithm import policy_loss
from ..config import PPOConfig
from .learner import Learner


class Actor(Learner, PolicyWorker[PPOConfig]):
    """One rank of the policy."""

    @rpc(remote_call.actor_init)
    def init_model(self, model_path: str, steps: int) -> None:
        """Load the policy into the training engine."""
        self.load(model_path, steps)

    @rpc(remote_call.actor_forward)
    def forward(self, samples: Batch, temperature: float) -> Batch:
        """Compute the log-probability of each token at a temperature."""
        return self.logprobs(samples, temperature)

    @rpc(remote_call.reference_forward)
    def forward_reference(self, samples: Batch) -> Batch:
        """Compute log-probabilities with the adapters disabled, if that is the reference."""
        return self.reference_logprobs(samples)

    @rpc(remote_call.actor_update)
    def update_actor(self, step: int, kl_coef: float) -> dict[str, float]:
        """Train on the experience."""
        loss = partial(policy_loss, config=self.config, kl_coef=kl_coef)
        return self.train_on_experience(loss, step, partial(mark_tokens, config=self.config, step=step))
