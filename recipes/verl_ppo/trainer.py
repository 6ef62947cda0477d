"""The training loop, with the stages of a step in verl's order."""

from collections.abc import Callable
from functools import cache

from components.batch import Batch
from components.data.samples import policy_inputs, with_status
from components.generate.config import SamplingConfig
from core import BaseTrainer, Future, WorkerGroup

from .algorithm import AdaptedKL, add_advantages, with_greedy_rewards
from .config import VerlPPOConfig
from .metrics import balanced, unbalanced
from .roles.actor_rollout_ref import ActorRolloutRefWorker
from .roles.critic import CriticWorker
from .roles.reward_model import RewardModelWorker
from .run import VerlRun


class VerlPPOTrainer(BaseTrainer):
    """Drives the worker groups of policy, critic, reference and reward model."""

    config: VerlPPOConfig
    actor_wg: WorkerGroup[ActorRolloutRefWorker]
    rollout_wg: WorkerGroup[ActorRolloutRefWorker]
    ref_wg: WorkerGroup[ActorRolloutRefWorker] | None = None
    critic_wg: WorkerGroup[CriticWorker] | None = None
    rm_wg: WorkerGroup[RewardModelWorker] | None = None

    def init(self) -> None:
        """Create a worker group for each role, read the prompts, load the models, and resume from any checkpoint."""
        config = self.config
        # Cached, so that parts which one role holds share its worker group.
        policy = cache(lambda role: WorkerGroup(role, ActorRolloutRefWorker))
        self.actor_wg = policy(config.placement.holder("actor"))
        self.rollout_wg = policy(config.placement.holder("rollout"))
        reference = config.placement.holder("actor" if config.is_own_reference else "ref")
        if config.needs_reference:
            self.ref_wg = policy(reference)
        if config.needs_critic:
            self.critic_wg = WorkerGroup("critic", CriticWorker)
        if config.reward.model_path:
            self.rm_wg = WorkerGroup("rm", RewardModelWorker)
        self.kl = AdaptedKL(config)
        self.policy_run = VerlRun(self, config, {"kl": self.kl})

    def make_rollouts(self, prompts: Batch, sampling: SamplingConfig, heldout: bool = False) -> Batch:
        """Sample and score a response to each prompt, for a training step or an evaluation (`heldout`).

        For ReMax, add `greedy_reward` [B], the reward of the greedy response to the same prompt.
        """
        rollouts = self.add_rewards(self.generate(prompts, sampling), heldout)
        if self.config.algorithm.estimator == "remax" and not heldout:
            # One greedy response per prompt, since all greedy responses to it are the same.
            first = prompts.select(prompts["sample_id"] == 0)
            greedy = self.generate(first, self.config.sampling(sampling.step, 0.0))
            rollouts = with_greedy_rewards(rollouts, self.add_rewards(greedy))
        return self.policy_run.drop_failed(rollouts, heldout)

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Sample a response to each prompt."""
        with self.policy_run.generating():  # the engines are awake, and the time is logged
            return self.rollout_wg.generate_sequences(prompts, sampling)

    def add_rewards(self, rollouts: Batch, heldout: bool = False) -> Batch:
        """Add `reward` and `score` [B], including rollouts whose reward failed."""
        score = self.score_heldout if heldout else self.score
        with self.policy_run.phase("reward"):
            return with_status(score(rollouts))

    def score_generated(self, rollouts: Batch) -> Batch:
        """Score rollouts that were generated without `make_rollouts`, and drop those whose reward failed."""
        return self.policy_run.drop_failed(self.add_rewards(rollouts))

    def fit(self) -> None:
        """Run one training step per batch of scored rollouts, with `samples_per_prompt` rollouts per prompt."""
        config = self.config
        training = self.policy_run
        if config.evaluate_only:
            training.validate(self.make_rollouts)
            return
        for rollouts in training.queue(self.make_rollouts, self.score_generated):  # resumes, runs ahead, stops
            batch, metrics = balanced(rollouts, len(self.actor_wg))
            if not config.algorithm.bypass:
                batch = self.compute("old_log_prob", self.actor_wg.compute_log_prob, batch)
            if config.algorithm.estimator == "optimal_token_baseline":
                batch = self.compute("old_log_prob", self.actor_wg.compute_sharp_log_prob, batch)
            if self.ref_wg is not None:
                batch = self.compute("ref", self.ref_wg.compute_ref_log_prob, batch)
            if self.critic_wg is not None:
                batch = self.compute("values", self.critic_wg.compute_values, batch)
            with training.phase("adv"):
                batch = add_advantages(unbalanced(batch), config, self.kl.coef)
                metrics |= self.kl.adapt(batch)
            updates = dict[str, dict[str, float]]()
            if self.critic_wg is not None:
                updates["critic"] = self.update("update_critic", self.critic_wg.update_critic, batch)
            # In the warm-up steps of the critic the values are too inaccurate to train the policy with.
            if self.trains_policy:
                updates["actor"] = self.update("update_actor", self.actor_wg.update_actor, batch)
            synced = self.update_weights(metrics)
            training.end_step(batch, metrics, weights_synced=synced, **updates)  # log, validate, checkpoint
        training.finish()

    def score(self, rollouts: Batch) -> Batch:
        """Add `reward` and `score`, computed by the reward model (if there is one) and the reward manager."""
        if self.rm_wg is not None:
            scores = self.rm_wg.compute_rm_score(rollouts.only("tokens")).result()
            rollouts = rollouts.with_sequences(**scores.per_sequence)
        return self.policy_run.add_rewards(rollouts)

    def score_heldout(self, rollouts: Batch) -> Batch:
        """Add `reward` and `score` to held-out rollouts. By default they are computed as in training."""
        return self.score(rollouts)

    def compute(self, phase: str, forward: Callable[[Batch], Future[Batch]], batch: Batch) -> Batch:
        """Run a forward pass and add its per-token columns to the batch."""
        with self.policy_run.phase(phase):
            return batch.with_tokens(**forward(policy_inputs(batch)).result().per_token)

    def update(
        self, phase: str, train: Callable[[Batch, int], list[dict[str, float]]], batch: Batch
    ) -> dict[str, float]:
        """Train on the step's responses. Return the metrics, which are the same on every rank."""
        with self.policy_run.phase(phase):
            # Objects are texts and labels, which no loss reads. Sending them to every rank would only take time.
            return train(batch.without(*batch.objects), self.policy_run.step)[0]

    @property
    def trains_policy(self) -> bool:
        """True if the policy is trained in this step: there is no critic, or its warm-up steps are over."""
        return self.critic_wg is None or self.policy_run.step > self.config.critic.warmup_steps

    def update_weights(self, metrics: dict[str, float]) -> bool:
        """Send the policy's weights to the engines and add their metrics. Return True if a new version was sent."""
        # With generation ahead of training every step publishes a version, even if the weights have not changed:
        # staleness is counted in versions.
        if not self.trains_policy and not self.config.asynchronous.ahead:
            return False
        with self.policy_run.phase("update_weights"):
            metrics |= self.policy_run.calls.sync_weights(self.policy_run.step)
            if self.config.syncs_reference(self.policy_run.step):
                self.policy_run.calls.sync_reference(self.policy_run.step, 1.0)
        return True
