"""Wall time of the phases of a training step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from training.tracking.event_types import PhaseEvent

P = ParamSpec("P")
R = TypeVar("R")


class PhaseClock:
    """Measures the phases of training steps.

    A step lasts from one `take` to the next. Work outside of the steps (evaluations and checkpoints) is subtracted. The
    phases of the thread that calls `take`, plus `other`, add up to the step. Each thread has its own phases.
    """

    def __init__(self, emit: Callable[[Any], object] = lambda _: None) -> None:
        """
        Args:
            emit: receives a PhaseEvent when a phase begins and another when it ends.
        """
        self._emit = emit
        # Per thread: generation ahead of training runs at the same time as the phases of the loop. In one sum, the
        # phases would exceed the time of the step.
        self._seconds = threading.local()
        self._beside = threading.local()
        self._beside_seconds = 0.0
        self._added: dict[str, float] = {}
        self._step_began: float | None = None

    def begin(self) -> None:
        """Begin the first step. Earlier time, such as the set-up, belongs to no step."""
        # Monotonic: the wall clock may be set back during a step, which would give a negative time.
        self._step_began = time.monotonic()
        self._beside_seconds = 0.0
        vars(self._seconds).clear()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time inside the block to the phase `name`.

        A phase may be entered several times in a step. Phases do not nest, and none is counted within `beside_step`.
        """
        return nullcontext() if vars(self._beside) else self._time(name, self._add_phase)

    def beside_step(self, name: str) -> AbstractContextManager[None]:
        """Report the phase `name`, and exclude its time from the phases and from the step."""
        return nullcontext() if vars(self._beside) else self._time_thread(name)

    def outside_step(self, name: str, act: Callable[P, R]) -> Callable[P, R]:
        """Wrap `act` so that it runs within `beside_step(name)`."""

        def act_in_phase(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.beside_step(name):
                return act(*args, **kwargs)

        return act_in_phase

    @contextmanager
    def _time_thread(self, name: str) -> Iterator[None]:
        with self._time(name, self._add_thread_phase):
            self._beside.phase = name
            try:
                yield
            finally:
                del self._beside.phase

    @contextmanager
    def _time(self, name: str, add: Callable[[str, float], None]) -> Iterator[None]:
        began = time.monotonic()
        event = PhaseEvent(name, time.time())
        self._emit(event)
        try:
            yield
        finally:
            # Also after an error: observers would else show the phase as running.
            seconds = time.monotonic() - began
            add(name, seconds)
            self._emit(replace(event, seconds=seconds))

    def _add_phase(self, name: str, seconds: float) -> None:
        phases: dict[str, float] = vars(self._seconds)
        phases[name] = phases.get(name, 0.0) + seconds

    def _add_thread_phase(self, name: str, seconds: float) -> None:  # noqa: ARG002 - called like _add_phase
        self._beside_seconds += seconds

    def take_phases(self) -> dict[str, float]:
        """Return the seconds of each phase of this thread since the last call."""
        seconds = dict(vars(self._seconds))
        vars(self._seconds).clear()
        return seconds

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the phases of another thread, from `take_phases`, to the result of the next `take`."""
        for name, value in seconds.items():
            self._added[name] = self._added.get(name, 0.0) + value

    def take(self) -> dict[str, float]:
        """Return `timing_s/<phase>`, `timing_s/other` and `timing_s/step`, and begin the next step.

        `other` is the time of the step that is in no phase of this thread. Phases of other threads ran at the same
        time, so they are not part of the sum. Waiting for them is a separate phase.
        """
        phases = self.take_phases()
        now = time.monotonic()
        # Without `begin`, the first step starts with its first phase.
        if self._step_began is None:
            self._step_began = now - self._beside_seconds - sum(phases.values())
        step = now - self._step_began - self._beside_seconds
        self._step_began = now
        self._beside_seconds = 0.0
        added = self._added
        self._added = {}
        shown = {name: phases.get(name, 0.0) + added.get(name, 0.0) for name in {**phases, **added}}
        shown["other"] = max(step - sum(phases.values()), 0.0)
        shown["step"] = step
        return {f"timing_s/{name}": seconds for name, seconds in shown.items()}
