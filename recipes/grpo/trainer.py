"""The loop: rollout, log-probabilities, advantages, update, weight sync. `B` responses, `N` all their tokens."""

from pathlib import Path

from components.batch import Batch
from components.engines.config import SamplingConfig
from core import BaseTrainer, replicate
from training.policy_run import PolicyRun

from . import remote_call
from .algorithm import add_advantages
from .config import GRPOConfig

COLUMNS = ("tokens", "action_mask", "advantage", "rollout_logprob", "logprob", "reference_logprob", "correction")
"""What the loss reads, where it is there."""


class GRPOTrainer(BaseTrainer):
    """Drives the roles: `RG_ROLLOUT` samples, `RG_ACTOR` trains, `RG_REFERENCE` is what the policy was at the start."""

    config: GRPOConfig

    def init(self) -> None:
        """Read the prompts, load the models, resume from a checkpoint if there is one."""
        self.training = PolicyRun(self, self.config, Path(__file__).parent)

    def fit(self) -> None:
        """Train for as many steps as there are prompts."""
        for rollouts in self.training.rollouts(self.generate, self.score):
            experience = self.compute_logprobs(rollouts)
            experience = add_advantages(experience, self.config)
            metrics = self.update(experience)
            self.sync_weights(experience)
            self.training.end_step(experience, metrics)  # log, evaluate, checkpoint
        self.training.finish()

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """One response to each prompt (an episode, with an agent), split over the engines.

        Returns:
            `tokens`, `action_mask` (1 where the policy wrote the token) and `rollout_logprob` [N]; `prompt_length`,
            `truncated`, `weight_version` [B].
        """
        return self.RG_ROLLOUT.generate(prompts, sampling)

    def score(self, rollouts: Batch) -> Batch:
        """Add `reward` and `score` [B], as `reward.source` or the agent's environment says."""
        return self.training.add_rewards(rollouts)

    def compute_logprobs(self, rollouts: Batch) -> Batch:
        """Add `logprob` and `reference_logprob` [N], in nats, where the loss needs them."""
        tokens = rollouts.only("tokens")
        views = []
        with self.training.phase("logprobs"):
            if self.config.needs_old_logprobs:
                views.append(self.RG_ACTOR.logprobs(tokens, self.config.rollout.temperature))
                if self.config.placement.collocate:
                    views[0].result()  # so that the reference has the cores for itself
            if self.config.needs_reference:
                views.append(self.RG_REFERENCE.logprobs(tokens))
            for view in views:
                rollouts = rollouts.with_tokens(**view.result().per_token)
        return rollouts

    def update(self, experience: Batch) -> dict[str, float]:
        """Train the policy; every rank is given all responses, and takes its share of each mini-batch."""
        columns = experience.only(*(name for name in COLUMNS if name in experience))
        with self.training.phase("train"):
            metrics = self.RG_ACTOR.update(replicate(columns), self.training.step)
        return {f"actor/{name}": value for name, value in metrics.items()}

    def sync_weights(self, experience: Batch) -> None:
        """Let the engines sample from the updated policy."""
        with self.training.phase("sync"):
            remote_call.sync_weights(self.training.step)
        self.training.weights_synced(experience)
