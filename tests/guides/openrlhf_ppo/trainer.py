"""The training loop of the guide's sequence diagram."""

from typing import Any

from core import RoleGroup

from . import remote_call
from .utils.experience_maker import SamplesGenerator


class PPOTrainer:
    """Calls the roles in the order of the guide."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.found: dict[str, Any] = {}

    def init_workers(self) -> None:
        futures = [
            remote_call.reference_init("zero", "ref"),
            remote_call.reward_init("zero", "rm"),
            remote_call.critic_init("zero", "critic"),
            remote_call.actor_init("zero", "actor"),
        ]
        self.found["inits"] = [future.result() for future in futures]

    def fit(self) -> None:
        for step in range(2):
            with remote_call.vllm_running(True):
                sequences = SamplesGenerator().generate([[1], [2, 3], [4]])
            rewards = remote_call.reward_forward(sequences)
            log_probs = remote_call.actor_forward(sequences, sequences, sequences)
            values = remote_call.critic_forward(sequences)
            ref_log_probs = remote_call.reference_forward(sequences)
            experience = [int(reward) for reward in rewards]
            appended = [
                remote_call.actor_append_experience(experience),
                remote_call.critic_append_experience(experience),
            ]
            for future in appended:
                future.result()
            critic_updates = remote_call.critic_update()
            self.found["update"] = remote_call.actor_update(0.5)
            self.found["critic_updates"] = critic_updates.result()
            remote_call.broadcast_to_vllm()
            remote_call.save_checkpoint(f"step{step}")
            self.found |= {
                "sequences": sequences,
                "rewards": list(rewards),
                "log_probs": log_probs[1:],
                "values": values[-1],
                "ref": list(ref_log_probs),
            }
        rollouts, actors = RoleGroup[Any]("ROLLOUT"), RoleGroup[Any]("ACTOR")
        self.found["versions"] = remote_call.weight_version()
        self.found["top_level"] = rollouts.call("engine_name", "an").result()
        self.found["imported"] = actors.call_rank0("version_of_common").result()
        self.found["anywhere"] = rollouts.call_rank0("anywhere").result()
        self.found["saved"] = actors.call("saved_checkpoints").result()
