"""A summary at the end of a run: the time of each phase, what the machine would allow, and one option to try."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from components.registry import find
from core import CallEvent, JobEvent
from core.placement import detect_devices
from plugins.light_meter.advice import advise
from training.tracking.event_types import StepEvent
from training.tracking.observers import RunObserver

LEAST_STEPS = 3
"""Number of steps below which nothing is said, because the first step includes allocations."""
SHOWN = 3
"""Number of phases in the summary."""
MEASURE = "run python scripts/measure_machine.py once to see the limit of this machine for each phase"


class LimitsObserver(RunObserver):
    """Averages the phases of the steps and their bounds, and prints a summary when the run ends."""

    def __init__(self, config: Any, roles: Mapping[str, int]) -> None:
        """
        Args:
            config: resolved configuration of a recipe that trains a policy on its own rollouts.
            roles: number of workers of each role.
        """
        self._config = config
        self._roles = roles
        self._steps = 0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._first = 0.0
        self._last = 0.0

    @classmethod
    def check(cls, options: Any) -> None:
        """See `ObserverType.check`. There is nothing to check."""

    @classmethod
    def open(cls, recipe: str, config: Any, roles: Mapping[str, int]) -> LimitsObserver | None:  # noqa: ARG003
        """See `ObserverType.open`. Runs that train on rollouts have a summary."""
        if not hasattr(config, "samples_per_prompt"):
            return None
        return cls(config, roles)

    def __call__(self, event: Any) -> None:
        """See `RunObserver.__call__`."""
        if isinstance(event, StepEvent) and "timing_s/step" in event.metrics:
            self._add_step(event)
        elif isinstance(event, CallEvent) and event.seconds is not None and self._first:
            if event.began >= self._first:
                self._busy[event.role] += event.seconds
        elif isinstance(event, JobEvent) and event.kind == "end":
            for text in self.summary():
                # The driver passes what is printed to its terminal, above the view of the run if there is one.
                print(text)

    def _add_step(self, event: StepEvent) -> None:
        if not self._first:
            # The first step allocates memory and compiles kernels.
            self._first = event.time
            return
        self._steps += 1
        self._last = event.time
        for name, value in event.metrics.items():
            if name.startswith(("timing_s/", "bound/")) or name == "perf/tokens_per_second":
                self._sums[name] += float(value)

    def summary(self) -> list[str]:
        """Return the lines of the summary. Empty after too few steps."""
        if self._steps + 1 < LEAST_STEPS:
            return []
        means = {name: value / self._steps for name, value in self._sums.items()}
        seconds = {name.removeprefix("timing_s/"): value for name, value in means.items() if name[:9] == "timing_s/"}
        lines: list[str] = []
        tokens = means.get("perf/tokens_per_second", 0.0) * seconds["step"]
        advice = advise(self._config, seconds, tokens, _cores(), detect_devices() > 0)
        for phase in _longest(means)[:SHOWN]:
            bound = means[f"bound/{phase}_s"]
            text = f"{phase} {seconds[phase]:.3g} s, allowed {bound:.2g} s ({bound / max(seconds[phase], 1e-9):.0%})"
            if advice is not None and advice.phase == phase:
                text += f", largest loss: {advice}"
                advice = None
            lines.append(text)
        if not lines and find("machine speed", "cached") is not None:
            lines.append(MEASURE)
        if advice is not None:
            lines.append(f"{advice.phase} {seconds[advice.phase]:.3g} s, largest loss: {advice}")
        return [*lines, *self._idle_text()]

    def _idle_text(self) -> Sequence[str]:
        """Return the share of the time in which each role waited, as text."""
        span = self._last - self._first
        idle = {
            role: max(0.0, 1 - self._busy[role] / count / max(span, 1e-9))
            for role, count in self._roles.items()
            if role in self._busy and role != "TRAINER"
        }
        if not idle:
            return []
        text = ", ".join(f"{role.lower()} {share:.0%}" for role, share in idle.items())
        return [f"idle: {text} of the time"]


def _longest(means: Mapping[str, float]) -> list[str]:
    """Return the phases that have a bound, the longest first."""
    bounded = [name[6:-2] for name in means if name.startswith("bound/") and name.endswith("_s")]
    return sorted((p for p in bounded if f"timing_s/{p}" in means), key=lambda p: -means[f"timing_s/{p}"])


def _cores() -> int:
    return len(os.sched_getaffinity(0))
