"""The contract of run observers: plug-ins that receive the events of a run in the driver.

A plug-in provides an `ObserverType` of the kind "run observer". `open` is called for every installed one, so an
observer that needs no option is on by default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from components.registry import load, names

OBSERVER = "run observer"
"""Kind of the plug-ins that provide run observers."""


class RunObserver(ABC):
    """An observer of core (`core.Observer`) that is opened before a run starts and closed after its end."""

    def start(self, run_dir: Path, emit: Callable[[Any], None]) -> Sequence[str]:  # noqa: ARG002 - for a subclass
        """Prepare for the run, whose folder exists now. Return lines for the user.

        Args:
            run_dir: the run folder. It holds the record of earlier attempts if the run resumes.
            emit: sends an event to events.jsonl, the terminal and all observers.
        """
        return ()

    @abstractmethod
    def __call__(self, event: Any) -> None:
        """Receive an event of core or of a run. Ignore events of unknown types: later versions may add some."""

    def close(self) -> None:  # noqa: B027 - an observer may hold nothing
        """Release the resources of the observer. Also called if the run is refused before it starts."""


class ObserverType(Protocol):
    """Constructor of a run observer that a plug-in provides."""

    @classmethod
    def check(cls, options: Any) -> None:
        """Check the options of the group `log` that the observer reads.

        Raises:
            ValueError: an option has an invalid value. The message says what to set.
        """
        ...

    @classmethod
    def open(cls, recipe: str, config: Any, roles: Mapping[str, int]) -> RunObserver | None:
        """Open the observer of a run, or return None if the configuration does not enable it.

        Args:
            recipe: name of the recipe.
            config: configuration of the run, or None for a job without one.
            roles: number of workers of each role.

        Raises:
            ValueError, OSError: it cannot be opened, such as a port that is in use.
        """
        ...


def open_observers(recipe: str, config: Any, roles: Mapping[str, int]) -> list[RunObserver]:
    """Open the observers of a run. The arguments are those of `ObserverType.open`."""
    opened: list[RunObserver] = []
    try:
        for name in names(OBSERVER):
            observer_type: ObserverType = load(OBSERVER, name)
            if (observer := observer_type.open(recipe, config, roles)) is not None:
                opened.append(observer)
    except (ValueError, OSError):
        # The command is refused. An observer that stays open could hold a port, and the next attempt would fail.
        close_observers(opened)
        raise
    return opened


def close_observers(observers: Sequence[RunObserver]) -> None:
    """Close observers in the reverse order of their opening."""
    for observer in reversed(observers):
        observer.close()
