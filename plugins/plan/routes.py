"""Host memory of the routes that `rollout.routing_replay` keeps for a training step."""

from __future__ import annotations

from components.models.size import ModelSize


def bytes_per_token(size: ModelSize) -> int:
    """Return the bytes of a token's route: a code per routed layer and expert, in columns of 8 bytes."""
    width = 1 if size.experts < 256 else 2
    return -(-size.mixtures * size.experts_per_token * width // 8) * 8


def route_bytes(size: ModelSize | None, sequences: int, longest: int) -> int:
    """Return the bytes of the routes of all responses of a step. 0 if the experts of the model are not known.

    Args:
        size: size of the policy.
        sequences: number of responses of a step.
        longest: maximum number of tokens of a response with its prompt.
    """
    return 0 if size is None else sequences * longest * bytes_per_token(size)
