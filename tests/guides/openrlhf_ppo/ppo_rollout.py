"""The rollout engine."""

from typing import Any

from core import rpc

from . import remote_call
from .common import BaseActor


@rpc
def engine_name(prefix: str) -> str:
    """A function at the top level of the entry point's module."""
    return f"{prefix} engine"


def made_elsewhere() -> str:
    return "made elsewhere"


rpc("anywhere", export=True)(made_elsewhere)


class LLM:
    """A substitute for vLLM's engine class."""

    def __init__(self) -> None:
        self.is_awake = False

    def wake_up(self) -> None:
        self.is_awake = True

    def sleep(self) -> None:
        self.is_awake = False


class VLLMActor(BaseActor):
    """Generates by repeating the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = LLM()
        self.version = 0

    @rpc(remote_call.vllm_wakeup)
    def wake_up(self) -> None:
        self.llm.wake_up()

    @rpc(remote_call.vllm_sleep)
    def sleep(self) -> None:
        self.llm.sleep()

    @rpc(remote_call.vllm_generate)
    def generate(self, prompt_token_ids: Any, params: Any) -> list[list[int]]:
        assert self.llm.is_awake
        return [ids * params["n"] for ids in prompt_token_ids]

    @rpc(remote_call.weight_sync)
    def load_weights(self, version: int) -> None:
        self.version = version

    @rpc(remote_call.weight_version)
    def loaded_version(self) -> int:
        return self.version
