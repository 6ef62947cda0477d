"""Events of a run for observers, besides those of core: steps, phases and alarms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepEvent:
    """Metrics of one step, emitted when they have been written to metrics.jsonl."""

    step: int
    steps: int
    """Total number of steps of the run, or 0 if it is not known."""
    time: float
    """Seconds since the epoch."""
    # These three are not written to events.jsonl, since metrics.jsonl and the rollouts hold them already.
    metrics: Mapping[str, Any] = field(metadata={"logged": False})
    """Numbers and texts by name."""
    shown: tuple[str, ...] = field(default=(), metadata={"logged": False})
    """Names of the metrics that are displayed to the user."""
    sample: Mapping[str, Any] | None = field(default=None, metadata={"logged": False})
    """One response of the step, with `prompt`, `response`, `label`, `reward`, `score` and `status`, or None."""


@dataclass(frozen=True)
class PhaseEvent:
    """Begin or end of a phase of the trainer, such as `generate` or `train`."""

    phase: str
    began: float
    """Seconds since the epoch."""
    seconds: float | None = None
    """Duration of the phase. None when it begins."""


@dataclass(frozen=True)
class AlarmEvent:
    """A problem that the user should look at. Each alarm is raised once per run."""

    alarm: str
    """Name of the alarm."""
    step: int
    time: float
    """Seconds since the epoch."""
    text: str
    """Description of the problem."""
    advice: str
    """Options to try."""
