"""Events of a run for observers, besides those of core: steps, phases and alarms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepEvent:
    """One line of metrics, as it was written down. `time`: seconds since the epoch.

    `steps` is how many the run is to have, 0 where that is not known. Of `metrics`, which are plain values, a person is
    to see those that are named in `shown`. `sample` is one of the step's responses: `prompt`, `response`, `label`,
    `reward`, `score`, `status`; None where there is none. The last three are not written to events.jsonl: metrics.jsonl
    and the rollouts hold them.
    """

    step: int
    steps: int
    time: float
    metrics: Mapping[str, Any] = field(metadata={"logged": False})
    shown: tuple[str, ...] = field(default=(), metadata={"logged": False})
    sample: Mapping[str, Any] | None = field(default=None, metadata={"logged": False})


@dataclass(frozen=True)
class PhaseEvent:
    """Begin or end of a phase of the trainer (`generate`, `train`, ...). `seconds` is None at the begin.

    `began` is in seconds since the epoch.
    """

    phase: str
    began: float
    seconds: float | None = None


@dataclass(frozen=True)
class AlarmEvent:
    """Something that a person should look at: what is wrong at `step`, and what to try. Each alarm sounds once."""

    alarm: str
    step: int
    time: float
    text: str
    advice: str
