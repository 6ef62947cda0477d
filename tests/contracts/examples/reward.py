"""A reward function: one reward per response, with scores and logs."""

from __future__ import annotations

from typing import Any


def reward_func(queries: list[str], prompts: list[str], labels: list[Any], **kwargs: Any) -> dict[str, Any]:
    """Return 1 minus a length penalty of at most 0.2 for a response that contains the label, else 0."""
    responses: list[str] = kwargs["responses"]
    is_right = [bool(response.strip()) and str(label) in response for response, label in zip(responses, labels)]
    rewards = [0.0] * len(responses)
    for place, response in enumerate(responses):
        if is_right[place]:
            rewards[place] = 1.0 - min(len(response) / 1000, 0.2)
    return {
        "rewards": rewards,
        "scores": [float(right) for right in is_right],
        "extra_logs": {"characters": [len(response) for response in responses]},
    }
