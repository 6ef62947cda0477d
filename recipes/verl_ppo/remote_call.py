"""Calls that involve several worker groups, or the whole job. A single group is called through its own methods."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import remote_call
from training.run.policy_calls import PolicyCalls

if TYPE_CHECKING:
    from core import WorkerGroup
    from training.options.rl_options import RLOptions

    from .roles.actor_rollout_ref import ActorRolloutRefWorker
    from .roles.critic import CriticWorker
    from .roles.reward_model import RewardModelWorker


class VerlCalls(PolicyCalls):
    """Implements `PolicyCalls` with worker groups. A worker with several tasks is one group under several names."""

    actor: "WorkerGroup[ActorRolloutRefWorker]"
    rollout: "WorkerGroup[ActorRolloutRefWorker]"
    critic: "WorkerGroup[CriticWorker] | None"
    reference: "WorkerGroup[ActorRolloutRefWorker] | None"
    reward_model: "WorkerGroup[RewardModelWorker] | None"

    def __init__(self, trainer: Any, config: "RLOptions") -> None:
        super().__init__(trainer, config)
        self.actor = trainer.actor_wg
        self.rollout = trainer.rollout_wg
        self.critic = trainer.critic_wg
        self.reference = trainer.ref_wg
        self.reward_model = trainer.rm_wg

    @property
    def samplers(self) -> "WorkerGroup[ActorRolloutRefWorker]":
        """See `PolicyCalls`."""
        return self.rollout

    @property
    def learners(self) -> "Sequence[WorkerGroup[Any]]":
        """See `PolicyCalls`."""
        return [group for group in (self.actor, self.critic) if group is not None]

    def load(self, steps: int) -> None:
        """Load the engines first, then all other models in parallel."""
        path = self.config.model.path
        loading = [self.rollout.init_rollout(path)]
        self.finish_loading(loading[0])
        loading.append(self.actor.init_model(path, steps))
        if self.critic is not None:
            loading.append(self.critic.init_model(self.trainer.config.critic.path or path, steps))
        if self.reward_model is not None:
            loading.append(self.reward_model.init_model(self.trainer.config.reward.model_path))
        if self.reference is not None and self.reference is not self.actor:
            loading.append(self.reference.init_model(path, steps))
        remote_call.wait_all(loading)

    # One group at a time: groups that share processes can run the collectives of one call only.

    def _save_learners(self, folder: Path) -> None:
        for group in self.learners:
            group.call("save_state", str(folder)).result()

    def _load_learners(self, folder: Path) -> list[str]:
        return [note for group in self.learners for note in group.call("load_state", str(folder)).result()[0]]

    def sync_reference(self, step: int, share: float = 1.0) -> None:
        """Replace the reference by the policy. `share` must be 1: verl's `ref_update_freq` copies all weights."""
        assert share == 1.0, share
        self.end_generation()
        target = Path(self.config.run_dir, "reference", f"step_{step}")
        shutil.rmtree(target, ignore_errors=True)
        self.save(target)
        self.load_reference(target)

    def _open_reference(self, path: Path) -> None:
        assert self.reference is not None
        self.reference.load_reference(str(path)).result()

    def sync_weights(self, version: int) -> dict[str, float]:
        """See `PolicyCalls`. Responses carry `version` from now on."""
        self.actor.call(remote_call.announce_weights, version).result()
        handle = remote_call.published_handle(self.actor.call(remote_call.publish_weights, version))
        engines = self.rollout.call(remote_call.receive_weights, handle).result()
        return remote_call.sync_metrics(handle, remote_call.check_engines(engines, self.actor, self.rollout))

    def end(self) -> None:
        """End the job for the policy's workers, which hold published weights and engine processes."""
        remote_call.wait_all([group.call(remote_call.end_job) for group in dict.fromkeys([self.actor, self.rollout])])
