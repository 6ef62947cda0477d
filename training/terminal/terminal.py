"""What the person at the terminal sees of a run, in the driver."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any

from plugins.live_view.run_view import RunView
from plugins.live_view.screen import Screen
from training.terminal.driver_log import driver_log
from training.tracking.event_types import AlarmEvent, StepEvent
from training.tracking.tracker import console_line

logger = logging.getLogger(__name__)


class Terminal:
    """An observer of a job. On a terminal it draws how the run stands, elsewhere it prints a line of `key=value` for
    every step; what is printed meanwhile scrolls up. What libraries write is in logs/driver.log.

    With backend=local everything is left as it is, so that breakpoints work: then it only prints.
    """

    def __init__(self, recipe: str, run_dir: Path, roles: Mapping[str, int], backend: str, began: float) -> None:
        """
        Args:
            recipe: its name.
            run_dir: the run's folder.
            roles: how many workers each role has.
            backend: "ray" or "local".
            began: seconds since the epoch at which the user started the run.
        """
        self._log = run_dir / "logs" / "driver.log" if backend == "ray" else None
        self._view = RunView(f"{recipe}  {run_dir}", roles, began)
        self._screen: Screen | None = None
        self._undo = ExitStack()
        self._out: Any = None

    def __enter__(self) -> Terminal:
        self._out = sys.stdout
        if self._log is None:
            return self
        with ExitStack() as undo:
            if _is_terminal(sys.stdout):
                sys.stdout.flush()
                self._screen = Screen(os.dup(sys.stdout.fileno()), self._view.frame, sys.stdout.encoding)
                undo.callback(self._screen.close)
            # A frame must be the only thing that is written to the terminal.
            undo.enter_context(driver_log(self._log, self.info, (2,) if self._screen is None else (1, 2)))
            lines = _Lines(self.info)
            undo.callback(lines.end)
            undo.enter_context(redirect_stdout(lines))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._undo.close()

    def __call__(self, event: Any) -> None:
        """Take in what the job tells."""
        self._view.take(event)
        if isinstance(event, AlarmEvent):
            self.info(f"warning: {event.text}; {event.advice}")
        elif self._screen is None and isinstance(event, StepEvent) and event.shown:
            self.info(console_line(event.step, {name: event.metrics[name] for name in event.shown}))

    def info(self, line: str) -> None:
        """Show a line."""
        if self._screen is not None:
            self._screen.info(line)
            return
        try:
            print(line, file=self._out, flush=True)
        # The reader of a pipe has gone, the disk of a file is full: no reason not to train.
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._out.fileno())
            os.close(nowhere)
            logger.warning("nothing more is printed: %s", error)


class _Lines(io.TextIOBase):
    """A stdout that hands on whole lines."""

    def __init__(self, info: Callable[[str], None]) -> None:
        self._info = info
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._info(line)
        return len(text)

    def end(self) -> None:
        """Hand on the line that has no end."""
        if self._begun:
            self.write("\n")


def _is_terminal(stream: Any) -> bool:
    """Whether frames can be drawn there, and somebody is likely to look at them."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("CI")
