"""What the person at the terminal sees of a run, in the driver."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from components.tracking.told import StepEvent
from components.tracking.tracker import console_line


class Terminal:
    """An observer of a job: a line of `key=value` for every step."""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def __call__(self, event: Any) -> None:
        """Take in what the job tells."""
        if isinstance(event, StepEvent) and event.shown:
            print(console_line(event.step, {name: event.metrics[name] for name in event.shown}), flush=True)
