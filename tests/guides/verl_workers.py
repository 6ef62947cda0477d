"""Substitutes for verl's worker classes: methods that `@register` decorates, on objects that are no roles."""

from core import Dispatch, register


class CriticWorker:
    """Keeps what it was called with."""

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
    """Generates too."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: list[str]) -> list[str]:
        assert self.ready
        return [prompt.upper() for prompt in prompts]


class AsyncActorRolloutRefWorker(ActorRolloutRefWorker):
    """The same."""


class RewardModelWorker(CriticWorker):
    """Scores."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]
