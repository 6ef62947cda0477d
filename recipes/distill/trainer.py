"""Training loop: rollouts, scores of the teacher, advantages, update, weight sync.

Shape suffixes: `B` responses, `N` all their tokens end to end.
"""

from pathlib import Path

from components.batch import Batch
from components.generate.config import SamplingConfig
from core import BaseTrainer, RoleGroup, replicate
from training.roles.rollout import RolloutWorker
from training.run.policy_calls import PolicyCalls
from training.run.policy_run import SHOWN, PolicyRun

from . import remote_call
from .algorithm import add_advantages, agreement
from .config import DistillConfig
from .roles.actor import Actor
from .roles.teacher import Teacher


class DistillCalls(PolicyCalls):
    """Calls of the run to the roles. The reference role holds the teacher."""

    config: DistillConfig

    @property
    def reference_model(self) -> str:
        """See `PolicyCalls.reference_model`."""
        return self.config.teacher.path


class DistillTrainer(BaseTrainer):
    """Trainer of the recipe. It calls the other roles through their role groups.

    RG_ROLLOUT samples, RG_ACTOR is trained, and RG_REFERENCE is the teacher, which is frozen.
    """

    config: DistillConfig
    RG_ACTOR: RoleGroup[Actor]
    RG_ROLLOUT: RoleGroup[RolloutWorker]
    RG_REFERENCE: RoleGroup[Teacher]

    def init(self) -> None:
        """Read the prompts, load the models, and resume from a checkpoint if the run folder has one."""
        calls = DistillCalls(self, self.config)
        shown = (*SHOWN, "distill/reverse_kl")
        self.policy_run = PolicyRun(self, self.config, Path(__file__).parent, calls=calls, shown=shown)

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

    def compare(self, rollouts: Batch) -> Batch:
        """Add the log-probabilities of the student and those of the teacher; see `Teacher.logprobs`."""
        experience = self.policy_run.compute_logprobs(rollouts)
        if self.config.has_baseline:
            names = [name for name in experience.per_token if name.startswith("teacher_id_")]
            with self.policy_run.phase("logprobs"):
                student = self.RG_ACTOR.student_top(experience.only("tokens", *names)).result()
            experience = experience.with_tokens(**student.per_token)
        return experience

    def fit(self) -> None:
        """Run the training loop: one step per batch of rollouts, with `samples_per_prompt` responses per prompt."""
        for rollouts in self.policy_run.queue(self.make_rollouts, self.score):  # resumes, prefetches, stops
            experience = self.compare(rollouts)
            experience = add_advantages(experience, self.config)
            with self.policy_run.phase("train"):
                tensors = experience.without(*experience.objects)  # ranks do not read text columns
                # Replicated, because each rank selects its share of every mini-batch itself.
                metrics = self.RG_ACTOR.update(replicate(tensors), self.policy_run.step)
            with self.policy_run.phase("sync"):
                sync_metrics = remote_call.sync_weights(self.policy_run.step)
            compared = agreement(experience, self.config)
            self.policy_run.end_step(experience, sync_metrics | compared, actor=metrics)  # log, evaluate, checkpoint
        self.policy_run.finish()
