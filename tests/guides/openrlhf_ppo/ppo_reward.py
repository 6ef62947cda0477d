"""The role reward."""

from typing import Any

from core import rpc

from . import remote_call
from .common import BaseActor, version_of_common

__all__ = ["RewardModelRayActor", "version_of_common"]


class RewardModelRayActor(BaseActor):
    """The role reward."""

    @rpc(remote_call.reward_init)
    def init_model(self, strategy: Any, model_path: str) -> str:
        del strategy
        return self.init(model_path)

    @rpc(remote_call.reward_forward)
    def forward(self, sequences: Any) -> list[float]:
        return [float(sum(sequence)) for sequence in sequences]
