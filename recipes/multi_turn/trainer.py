"""The loop: rollouts, log-probabilities, advantages, update, weight sync. `B` episodes, `N` all their tokens."""

from pathlib import Path

from components.batch import Batch
from components.generate.config import SamplingConfig
from core import BaseTrainer, RoleGroup, replicate
from training.roles.reference import ReferenceWorker
from training.roles.rollout import RolloutWorker
from training.run.policy_run import SHOWN, PolicyRun

from . import remote_call
from .algorithm import add_advantages
from .config import MultiTurnConfig
from .roles.actor import Actor


class MultiTurnTrainer(BaseTrainer):
    """Drives the roles: RG_ROLLOUT samples, RG_ACTOR trains, RG_REFERENCE, where there is a KL, is frozen."""

    config: MultiTurnConfig
    RG_ACTOR: RoleGroup[Actor]
    RG_ROLLOUT: RoleGroup[RolloutWorker]
    RG_REFERENCE: RoleGroup[ReferenceWorker]

    def init(self) -> None:
        """Read the prompts, load the models, resume from a checkpoint if there is one."""
        shown = [name if name != "rollout/response_length" else "rollout/turns_mean" for name in SHOWN]
        self.policy_run = PolicyRun(self, self.config, Path(__file__).parent, shown=shown)

    def make_rollouts(self, prompts: Batch, sampling: SamplingConfig, heldout: bool = False) -> Batch:
        """Play an episode of each prompt and score it, for a training step or an evaluation (`heldout`)."""
        with self.policy_run.generating():  # the engines are awake, and the time is logged
            rollouts = self.RG_ROLLOUT.generate(prompts, sampling)
        return self.score(rollouts, heldout)

    def score(self, rollouts: Batch, heldout: bool = False) -> Batch:
        """Add `reward` and `score` [B]. Those whose reward failed are left out."""
        return self.policy_run.score(rollouts, heldout)

    def fit(self) -> None:
        """One training step per batch of episodes, `samples_per_prompt` of each prompt."""
        for rollouts in self.policy_run.queue(self.make_rollouts, self.score):  # resumes, runs ahead, stops
            experience = self.policy_run.compute_logprobs(rollouts)  # of old policy and reference, where needed
            experience = add_advantages(experience, self.config)
            with self.policy_run.phase("train"):
                tensors = experience.without(*experience.objects)  # prompts and labels as text are not sent
                # Every rank is given all episodes, and takes its share of each mini-batch.
                metrics = self.RG_ACTOR.update(replicate(tensors), self.policy_run.step)
            with self.policy_run.phase("sync"):
                engines = remote_call.sync_weights(self.policy_run.step)
            self.policy_run.end_step(experience, engines, actor=metrics)  # log, evaluate, checkpoint
        self.policy_run.finish()
