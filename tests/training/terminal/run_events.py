"""Events of a run for tests of the terminal."""

from __future__ import annotations

from typing import Any

from core import CallEvent
from training.tracking import StepEvent


def step(number: int, of: int = 10, sample: dict[str, Any] | None = None, **metrics: Any) -> StepEvent:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return StepEvent(number, of, 0.0, named, tuple(named), sample)


def call(role: str, rank: int, method: str, began: float = 5.0) -> CallEvent:
    return CallEvent("grpo", role, rank, method, began, 0)
