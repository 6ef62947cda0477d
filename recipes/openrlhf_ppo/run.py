"""The run of this recipe: a reward role computes the rewards, and roles are called through remote_call.py."""

from pathlib import Path

from components.batch import Batch
from components.generate.config import SamplingConfig
from core import Role, RoleGroup
from training.remote_call import wait_all
from training.run.failed_rewards import split_failed
from training.run.policy_calls import PolicyCalls
from training.run.policy_run import PolicyRun

from . import remote_call
from .config import PPOConfig


class PPORun(PolicyRun):
    """See `PolicyRun`. Rewards are computed together with log-probs, unless prompts are filtered by them."""

    config: PPOConfig  # pyright: ignore[reportIncompatibleVariableOverride] (set once)

    def add_rewards(self, rollouts: Batch, heldout: bool = False) -> Batch:
        """Add `reward`, `score` and further columns from the reward role, or from an agent's environment."""
        if self.config.agent.func_path:
            return super().add_rewards(rollouts)
        rewards: Batch = remote_call.reward_forward(rollouts, heldout, self.step).result()
        return rollouts.with_sequences(**rewards.per_sequence)

    def drop_failed_of_step(self, experience: Batch) -> Batch:
        """Drop and record the rollouts whose reward failed, if rewards were computed together with the log-probs.

        Raises:
            RewardError: too few rollouts are left for the optimizer steps.
        """
        if not self.config.scores_with_experience:
            return experience  # `score` has dropped them already
        rewarded, failed = split_failed(experience)
        if failed is not None:
            self.failed_rewards.check(rewarded, failed)
        self.failed_rewards.record(failed, rewarded, self.tracker, self.step)
        return rewarded

    def put_back(self) -> None:
        """Save the current rollouts, whose rewards have failed, for the next start. The run ends after this call."""
        self.stream.put_back()
        self.checkpoints.save_unfinished()


class PPOCalls(PolicyCalls):
    """Calls of a run to its roles, through the functions of remote_call.py."""

    config: PPOConfig

    def load(self, steps: int) -> None:
        """Load all models in parallel. `steps` is the length of the learning-rate schedules."""
        path = self.config.model.path
        options = self.config
        loading = [remote_call.rollout_init(path)]
        self.finish_loading(loading[0])
        loading += [remote_call.reward_init(path), remote_call.actor_init(path, steps)]
        if options.needs_critic:
            loading.append(remote_call.critic_init(options.critic_start, steps))
        if options.has_reference_role:
            loading.append(remote_call.reference_init(path))
        wait_all(loading)

    def generate(self, prompts: Batch, sampling: SamplingConfig) -> Batch:
        """Sample one response or episode per prompt."""
        parts = prompts.split(min(self.engines, len(prompts)))
        return Batch.concat(remote_call.generate_samples(parts, sampling).result())

    def save_state(self, folder: Path) -> None:
        """Save the training state, and the critic if critic.save is set."""
        super().save_state(folder)
        if self.config.critic.save:
            RoleGroup(Role.CRITIC).call("save", str(folder / "critic")).result()

    def end(self) -> None:
        """See `PolicyCalls.end`."""
        remote_call.end_job()
