"""Substitutes for verl's worker classes: methods decorated with `@register`, on classes that are no roles."""

from core import Dispatch, register


class CriticWorker:
    """Worker that stores its arguments."""

    def __init__(self) -> None:
        self.ready = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> bool:
        self.ready = True
        return self.ready

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self, batch: list[int]) -> list[int]:
        assert self.ready
        return [value + 1 for value in batch]


class ActorRolloutRefWorker(CriticWorker):
    """Worker that also generates."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: list[str]) -> list[str]:
        assert self.ready
        return [prompt.upper() for prompt in prompts]


class AsyncActorRolloutRefWorker(ActorRolloutRefWorker):
    """Another worker with the same methods."""


class RewardModelWorker(CriticWorker):
    """Worker that returns scores."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]
