"""Training loop: rollouts, log-probabilities, advantages, update, weight sync.

Shape suffixes: `B` responses, `N` all their tokens end to end.
"""

from pathlib import Path

from components.batch import Batch
from components.generate.config import SamplingConfig
from core import BaseTrainer, RoleGroup, replicate
from training.roles.reference import ReferenceWorker
from training.roles.rollout import RolloutWorker
from training.run.policy_run import PolicyRun

from . import remote_call
from .algorithm import add_advantages
from .config import GRPOConfig
from .roles.actor import Actor


class GRPOTrainer(BaseTrainer):
    """Trainer of the recipe. It calls the other roles through their role groups.

    RG_ROLLOUT samples, RG_ACTOR is trained, and RG_REFERENCE is frozen. RG_REFERENCE is started only with a KL penalty.
    """

    config: GRPOConfig
    RG_ACTOR: RoleGroup[Actor]
    RG_ROLLOUT: RoleGroup[RolloutWorker]
    RG_REFERENCE: RoleGroup[ReferenceWorker]

    def init(self) -> None:
        """Read the prompts, load the models, and resume from a checkpoint if the run folder has one."""
        self.policy_run = PolicyRun(self, self.config, Path(__file__).parent)

    def make_rollouts(self, prompts: Batch, sampling: SamplingConfig, heldout: bool = False) -> Batch:
        """Sample and score one response per row of `prompts`.

        Args:
            prompts: one row per response; a prompt with several responses is repeated.
            sampling: temperature, maximum length and seed.
            heldout: True in an evaluation, False in a training step.
        """
        with self.policy_run.generating():  # wakes the engines, and logs the time
            rollouts = self.RG_ROLLOUT.generate(prompts, sampling)
        return self.score(rollouts, heldout)

    def score(self, rollouts: Batch, heldout: bool = False) -> Batch:
        """Add `reward` and `score` [B]. Exclude the responses whose reward failed."""
        return self.policy_run.score(rollouts, heldout)

    def fit(self) -> None:
        """Run the training loop: one step per batch of rollouts, with `samples_per_prompt` responses per prompt."""
        for rollouts in self.policy_run.queue(self.make_rollouts, self.score):  # resumes, prefetches, stops
            experience = self.policy_run.compute_logprobs(rollouts)  # of old policy and reference, if needed
            experience = add_advantages(experience, self.config)
            with self.policy_run.phase("train"):
                tensors = experience.without(*experience.objects)  # ranks do not read text columns
                # Replicated, because each rank selects its share of every mini-batch itself.
                metrics = self.RG_ACTOR.update(replicate(tensors), self.policy_run.step)
            with self.policy_run.phase("sync"):
                sync_metrics = remote_call.sync_weights(self.policy_run.step)
                if self.config.syncs_reference(self.policy_run.step):
                    self.policy_run.calls.sync_reference(self.policy_run.step, self.config.algorithm.reference_mixup)
            self.policy_run.end_step(experience, sync_metrics, actor=metrics)  # log, evaluate, checkpoint
        self.policy_run.finish()
