"""The role critic."""

from typing import Any

from core import rpc

from . import remote_call
from .common import BaseActor, version_of_common

__all__ = ["CriticModelRayActor", "version_of_common"]


class CriticModelRayActor(BaseActor):
    """The role critic."""

    @rpc(remote_call.critic_init)
    def init_model(self, strategy: Any, model_path: str) -> str:
        del strategy
        return self.init(model_path)

    @rpc(remote_call.critic_forward)
    def forward(self, sequences: Any) -> list[float]:
        return [0.5 for _ in sequences]

    @rpc(remote_call.critic_append_experience)
    def append_experience(self, experience: list[int]) -> int:
        self.experience += experience
        return len(self.experience)

    @rpc(remote_call.critic_update)
    def update(self) -> int:
        return len(self.experience)

    @rpc(remote_call.save_checkpoint)
    def save_checkpoint(self, tag: str) -> None:
        self.saved.append(tag)
