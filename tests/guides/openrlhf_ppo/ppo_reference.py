"""The role reference."""

from typing import Any

from core import rpc

from . import remote_call
from .common import BaseActor, version_of_common

__all__ = ["PPOReferenceActor", "version_of_common"]


class PPOReferenceActor(BaseActor):
    """The role reference."""

    @rpc(remote_call.reference_init)
    def init_model(self, strategy: Any, model_path: str) -> str:
        del strategy
        return self.init(model_path)

    @rpc(remote_call.reference_forward)
    def forward(self, sequences: Any) -> list[float]:
        return [-2.0 * len(sequence) for sequence in sequences]
