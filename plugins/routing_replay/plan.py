"""Host memory of the routes of a training step, for the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from components.models.size import ModelSize, model_size

if TYPE_CHECKING:
    from training.options.rl_options import RLOptions

E = TypeVar("E", bound=Any)


def bytes_per_token(size: ModelSize) -> int:
    """Return the bytes of a token's route: a code per routed layer and expert, in columns of 8 bytes."""
    width = 1 if size.experts < 256 else 2
    return -(-size.mixtures * size.experts_per_token * width // 8) * 8


def with_routes(estimate: E, model_path: str, config: RLOptions, longest: int) -> E:
    """Return the memory of a rank of the policy with the routes of a step, as far as the experts are known.

    Every rank holds all responses of the step in host memory, and selects its share by itself.

    Args:
        estimate: the plan's `MemoryEstimate` without routes.
        model_path: path of the policy.
        config: options of the run.
        longest: maximum number of tokens of a response with its prompt.
    """
    size = model_size(model_path)
    if size is None or config.rollout.routing_replay == "off":
        return estimate
    return replace(estimate, host=estimate.host + config.step_size * longest * bytes_per_token(size))
