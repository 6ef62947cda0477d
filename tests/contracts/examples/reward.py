"""A reward function: one number for each answer, and what else is worth knowing about it."""

from __future__ import annotations

from typing import Any


def reward_func(queries: list[str], prompts: list[str], labels: list[Any], **kwargs: Any) -> dict[str, Any]:
    """Give 1 for the label, a little less when much is said around it, and 0 for anything else."""
    responses: list[str] = kwargs["responses"]
    right = [bool(response.strip()) and str(label) in response for response, label in zip(responses, labels)]
    waste = [min(len(response) / 1000, 0.2) for response in responses]
    return {
        "rewards": [float(ok) - (cost if ok else 0.0) for ok, cost in zip(right, waste)],
        "scores": [float(ok) for ok in right],
        "extra_logs": {"characters": [len(response) for response in responses]},
    }
