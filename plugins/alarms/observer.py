"""Alarms as an observer of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from plugins.alarms.alarms import Alarms
from training.options.described import options_of
from training.tracking.event_types import StepEvent
from training.tracking.observers import RunObserver


class AlarmObserver(RunObserver):
    """Checks the metrics of every step, and emits an `AlarmEvent` for each alarm that they raise."""

    def __init__(self, options: Collection[str], silent: Collection[str] = ()) -> None:
        """
        Args:
            options: names of the options that have an effect in the run. Advice that names other options is left out.
            silent: names of alarms that do not apply to the run.
        """
        self._alarms = Alarms(options, silent)
        self._emit: Callable[[Any], None] = lambda _: None

    @classmethod
    def check(cls, options: Any) -> None:
        """See `ObserverType.check`. There is nothing to check."""

    @classmethod
    def open(cls, recipe: str, config: Any, roles: Mapping[str, int]) -> AlarmObserver:  # noqa: ARG003
        """See `ObserverType.open`. Every run has alarms."""
        # If the reference is not the initial policy, the KL is above 0 before the first update, which is no error.
        silent: list[str] = []
        if not getattr(config, "starts_as_reference", True):
            silent.append("start")
        return cls(options_in_use(config), silent)

    def start(self, run_dir: Path, emit: Callable[[Any], None]) -> Sequence[str]:
        """See `RunObserver.start`."""
        # A resumed run must not raise the alarms of its earlier starts again.
        self._alarms.recall(run_dir)
        self._emit = emit
        return ()

    def __call__(self, event: Any) -> None:
        """See `RunObserver.__call__`."""
        if isinstance(event, StepEvent):
            for alarm in self._alarms.look(event.step, event.metrics):
                self._emit(alarm)


def options_in_use(config: Any) -> set[str]:
    """Return the names of the options that have an effect in a run with this configuration."""
    if not is_dataclass(config):
        return set()
    names = {option.name for option in options_of(type(config))}
    agent = getattr(config, "agent", None)
    if agent and agent.func_path:
        return names
    # Without an agent these options change nothing, so advice to set them would not help.
    return {name for name in names if not name.startswith("agent.")}
