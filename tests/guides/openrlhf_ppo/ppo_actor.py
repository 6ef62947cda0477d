"""The role actor."""

from typing import Any

from core import rpc

from . import remote_call
from .common import BaseActor, version_of_common

__all__ = ["PolicyModelActor", "version_of_common"]


class PolicyModelActor(BaseActor):
    """The role actor."""

    @rpc(remote_call.actor_init)
    def init_model(self, strategy: Any, model_path: str) -> str:
        del strategy
        return self.init(model_path)

    @rpc(remote_call.actor_forward)
    def forward(self, sequences: Any, action_mask: Any, attention_mask: Any) -> list[Any]:
        assert len(sequences) == len(action_mask) == len(attention_mask)
        return [-1.0 * len(sequence) for sequence in sequences]

    @rpc(remote_call.actor_append_experience)
    def append_experience(self, experience: list[int]) -> int:
        self.experience += experience
        return len(self.experience)

    @rpc(remote_call.actor_update)
    def update(self, kl: float) -> dict[str, float]:
        return {"loss": sum(self.experience) + kl}

    @rpc(remote_call.broadcast_to_vllm)
    def broadcast(self) -> None:
        remote_call.weight_sync(len(self.experience))

    @rpc(remote_call.save_checkpoint)
    def save_checkpoint(self, tag: str) -> None:
        self.saved.append(tag)

    @rpc  # exported under the name of the method
    def saved_checkpoints(self) -> list[str]:
        return self.saved
