"""The loop: rollouts, log-probabilities, advantages, update, weight sync. `B` responses, `N` all their tokens."""

from pathlib import Path

from core import BaseTrainer, replicate
from training.policy_run import PolicyRun

from . import remote_call
from .algorithm import add_advantages
from .config import GRPOConfig


class GRPOTrainer(BaseTrainer):
    """Drives the roles: RG_ROLLOUT samples, RG_ACTOR trains, RG_REFERENCE stays what the policy was at the start."""

    config: GRPOConfig

    def init(self) -> None:
        """Read the prompts, load the models, resume from a checkpoint if there is one."""
        self.training = PolicyRun(self, self.config, Path(__file__).parent)

    def fit(self) -> None:
        """One training step per batch of scored rollouts, `samples_per_prompt` of each prompt."""
        for rollouts in self.training.rollouts(self.RG_ROLLOUT.generate):
            experience = self.training.compute_logprobs(rollouts)  # of policy and reference, before the update
            experience = add_advantages(experience, self.config)
            with self.training.phase("train"):
                columns = experience.without(*experience.objects)  # prompts and labels as text are not sent
                # Every rank is given all responses, and takes its share of each mini-batch.
                metrics = self.RG_ACTOR.update(replicate(columns), self.training.step)
            with self.training.phase("sync"):
                remote_call.sync_weights(self.training.step)
            self.training.end_step(experience, actor=metrics)  # log, evaluate, checkpoint
        self.training.finish()
