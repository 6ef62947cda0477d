"""How this recipe's run differs from others: a role rewards, and roles are reached by stubs."""

from pathlib import Path

from components.batch import Batch
from components.generate.config import SamplingConfig
from core import Role, RoleGroup
from training.remote_call import wait_all
from training.run.policy_calls import PolicyCalls
from training.run.policy_run import PolicyRun

from . import remote_call
from .config import PPOConfig


class PPORun(PolicyRun):
    """See `PolicyRun`. Rewards are computed together with log-probs, unless they say which prompts stay."""

    config: PPOConfig  # pyright: ignore[reportIncompatibleVariableOverride] (set once)

    def add_rewards(self, rollouts: Batch, heldout: bool = False) -> Batch:
        """Add `reward`, `score` and whatever else the reward role says of each, unless an agent's environment has."""
        if self.config.agent.func_path:
            return super().add_rewards(rollouts)
        found: Batch = remote_call.reward_forward(rollouts, heldout, self.step).result()
        return rollouts.with_sequences(**found.per_sequence)

    def drop_failed_of_step(self, experience: Batch) -> Batch:
        """Leave out the rollouts whose reward failed, where rewards came with the log-probs."""
        if not self.config.scores_with_experience:
            return experience  # `score` has left them out
        return self.failed_rewards.drop_of_step(experience, self.tracker, self.step)

    def put_back(self) -> None:
        """Let the rollouts at hand, whose rewards have failed, wait for the next start of the run, which ends now."""
        self.stream.put_back()
        self.checkpoints.save_unfinished()


class PPOCalls(PolicyCalls):
    """What a run asks of the roles, by the stubs of remote_call.py."""

    config: PPOConfig

    def load(self, steps: int) -> None:
        """Load every model, in parallel; `steps` set the length of schedules."""
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
        """One response to each prompt, or one episode."""
        parts = prompts.split(min(self.engines, len(prompts)))
        return Batch.concat(remote_call.generate_samples(parts, sampling).result())

    def save_state(self, folder: Path) -> None:
        """Write what training resumes from, and the critic where that is asked for."""
        super().save_state(folder)
        if self.config.critic.save:
            RoleGroup(Role.CRITIC).call("save", str(folder / "critic")).result()

    def end(self) -> None:
        """See `PolicyCalls.end`."""
        remote_call.end_job()
