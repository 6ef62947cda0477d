"""How long the phases of a training step take."""

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
    """How long the phases of a step take. Each thread has phases of its own."""

    def __init__(self, emit: Callable[[Any], object] = lambda _: None) -> None:
        """
        Args:
            emit: takes a PhaseEvent when a phase begins and when it ends; a workload's `emit` brings it to the driver.
        """
        self._emit = emit
        self._seconds = threading.local()
        self._outside = threading.local()
        self._added: dict[str, float] = {}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count what happens inside to the phase `name`. Phases may come again, and do not nest. Within `outside_step`
        nothing is counted.
        """
        return nullcontext() if vars(self._outside) else self._at(name, counts=True)

    def outside_step(self, name: str, act: Callable[P, R]) -> Callable[P, R]:
        """`act`, told as the phase `name`, and not counted: what is done beside the steps, such as evaluations."""

        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._at(name, counts=False):
                self._outside.phase = name
                try:
                    return act(*args, **kwargs)
                finally:
                    del self._outside.phase

        return within

    @contextmanager
    def _at(self, name: str, counts: bool) -> Iterator[None]:
        began, event = time.monotonic(), PhaseEvent(name, time.time())
        self._emit(event)
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            if counts:
                own: dict[str, float] = vars(self._seconds)
                own[name] = own.get(name, 0.0) + seconds
            self._emit(replace(event, seconds=seconds))

    def hand_over(self) -> dict[str, float]:
        """Seconds of each phase of this thread since the last call."""
        seconds = dict(vars(self._seconds))
        vars(self._seconds).clear()
        return seconds

    def add(self, seconds: Mapping[str, float]) -> None:
        """Show what another thread has handed over together with the phases of the next `take`."""
        for name, value in seconds.items():
            self._added[name] = self._added.get(name, 0.0) + value

    def take(self) -> dict[str, float]:
        """`timing_s/<phase>` of each phase since the last call, and `timing_s/step`, the sum of this thread's.

        What was added is shown, and not in the sum: it happened meanwhile. A loop that waits for it counts that.
        """
        own = self.hand_over()
        self._added, added = {}, self._added
        shown = {name: own.get(name, 0.0) + added.get(name, 0.0) for name in {**own, **added}}
        return {f"timing_s/{name}": value for name, value in (shown | {"step": sum(own.values())}).items()}
