"""The training loop: rollouts, rewards and log-probs, advantages, updates, weight sync.

Legend: `B` responses, `N` tokens of all responses.
"""

from pathlib import Path

from components.batch import Batch
from components.data.samples import policy_inputs, with_status
from components.generate.config import SamplingConfig
from components.rewards.errors import RewardError
from core import BaseTrainer

from . import remote_call
from .algorithm import AdaptedKL, add_advantages
from .config import PPOConfig
from .run import PPOCalls, PPORun


class PPOTrainer(BaseTrainer):
    """Drives actor, critic, reward, reference and rollout."""

    config: PPOConfig

    def init(self) -> None:
        """Read the prompts, load the models, and resume from a checkpoint if there is one."""
        self.kl = AdaptedKL(self.config)
        self.calls = PPOCalls(self, self.config)
        self.policy_run = PPORun(self, self.config, Path(__file__).parent, calls=self.calls, parts={"kl": self.kl})

    def make_rollouts(self, prompts: Batch, sampling: SamplingConfig, heldout: bool = False) -> Batch:
        """Sample a response to each prompt, for a training step or an evaluation (`heldout`), and score it."""
        with self.policy_run.generating():  # the engines are awake, and the time is logged
            rollouts = self.calls.generate(prompts, sampling)
        return self.score(rollouts, heldout)

    def score(self, rollouts: Batch, heldout: bool = False) -> Batch:
        """Add `reward` and `score` [B], unless `make_experience` computes them together with the log-probs."""
        if self.config.scores_with_experience and not heldout:
            return with_status(rollouts)
        return self.policy_run.score(rollouts, heldout)

    def fit(self) -> None:
        """Run one training step per batch of rollouts: `samples_per_prompt` for each of `prompts_per_step` prompts."""
        run = self.policy_run
        for rollouts in run.queue(self.make_rollouts, self.score):  # resumes, runs ahead, stops
            with run.phase("experience"):
                experience = self.make_experience(rollouts)  # rewards, log-probs and values, all at the same time
                experience = add_advantages(experience, self.config, self.kl.coef)
            with run.phase("train"):
                metrics = self.update(experience)  # critic and actor, at the same time
            # With generation ahead of training every step publishes a version, even if the weights have not changed:
            # staleness is counted in versions.
            has_synced = self.is_actor_trained or run.config.asynchronous.ahead > 0
            if has_synced:
                with run.phase("sync"):
                    metrics |= self.calls.sync_weights(run.step)
            run.end_step(experience, metrics, weights_synced=has_synced)  # log, evaluate, checkpoint
        run.finish()

    def make_experience(self, rollouts: Batch) -> Batch:
        """Add `reward` and `score` [B], and `logprob`, `value` and `reference_logprob` [N], as needed."""
        tokens = rollouts.only("tokens")
        # All calls are sent before the first result is read, so that the roles compute at the same time.
        futures = [remote_call.actor_forward(policy_inputs(rollouts), self.config.rollout.temperature)]
        if "reward" not in rollouts:
            futures.append(remote_call.reward_forward(rollouts, step=self.policy_run.step - 1))
        if self.config.needs_critic:
            futures.append(remote_call.critic_forward(tokens))
        if self.config.needs_reference:
            futures.append(remote_call.reference_forward(tokens))
        try:
            for future in futures:
                columns: Batch = future.result()
                rollouts = rollouts.with_tokens(**columns.per_token).with_sequences(**columns.per_sequence)
            return self.policy_run.drop_failed_of_step(rollouts)
        except RewardError:
            # The responses are saved with the checkpoint, and scored after a resume.
            self.policy_run.put_back()
            raise

    def update(self, experience: Batch) -> dict[str, float]:
        """Train critic and actor, and adapt the KL coefficient. Return the metrics."""
        step = self.policy_run.step
        remote_call.append_experience(experience.without(*experience.objects))
        metrics = {}
        if self.config.needs_reference:
            metrics["actor/kl_coef"] = self.kl.coef
        # Both updates are started before the first result is read, so that critic and actor train at the same time.
        updates = {}
        if self.config.needs_critic:
            updates["critic"] = remote_call.critic_update(step)
            for name in ("value", "return"):
                metrics[f"critic/{name}"] = float(experience[name][experience["action_mask"]].mean())
        if self.is_actor_trained:
            updates["actor"] = remote_call.actor_update(step, self.kl.coef)
        for role, update in updates.items():
            metrics |= {f"{role}/{name}": value for name, value in update.result()[0].items()}
        if self.is_actor_trained:
            self.kl.adapt(experience, metrics)
        return metrics

    @property
    def is_actor_trained(self) -> bool:
        """True if the policy is trained in this step: there is no critic, or its warm-up steps are over."""
        return not self.config.needs_critic or self.policy_run.step > self.config.critic.warmup_steps
