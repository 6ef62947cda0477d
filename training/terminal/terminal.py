"""Output of a run on the terminal or in a pipe, in the driver."""

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

from components.registry import find
from training.terminal.view import LIVE, VIEW, TerminalView
from training.tracking.event_types import AlarmEvent, StepEvent
from training.tracking.tracker import console_line

logger = logging.getLogger(__name__)


class Terminal:
    """An observer of a job that prints a line of `key=value` pairs for each step.

    On a terminal it shows a view of the run instead, if a plug-in provides one, and lines scroll above it. Output of
    libraries goes to logs/driver.log. With backend=local no stream is redirected, so that breakpoints work.
    """

    def __init__(self, recipe: str, run_dir: Path, roles: Mapping[str, int], backend: str, began: float) -> None:
        """
        Args:
            recipe: name of the recipe.
            run_dir: run folder.
            roles: number of workers of each role.
            backend: "ray" or "local".
            began: time at which the user started the run, in seconds since the epoch.
        """
        self._log = run_dir / "logs" / "driver.log" if backend == "ray" else None
        self._title, self._roles, self._began = f"{recipe}  {run_dir}", roles, began
        self._view: TerminalView | None = None
        self._undo = ExitStack()
        self._out: Any = None

    def __enter__(self) -> Terminal:
        self._out = sys.stdout
        if self._log is None:
            return self
        redirected: tuple[int, ...] = (2,)
        with ExitStack() as undo:
            if _is_terminal(sys.stdout) and (view_type := find(VIEW, LIVE)):
                sys.stdout.flush()
                terminal = os.dup(sys.stdout.fileno())
                view: TerminalView = view_type(self._title, self._roles, self._began, terminal, sys.stdout.encoding)
                undo.callback(view.close)
                self._view = view
                # Only the view may write to its terminal: other output would move the cursor that it relies on.
                redirected = (1, 2)
            # Without the plug-in the output of Ray stays on the terminal.
            if driver_log := find("driver log", "file"):
                undo.enter_context(driver_log(self._log, self.info, redirected))
            lines = _Lines(self.info)
            undo.callback(lines.end)
            undo.enter_context(redirect_stdout(lines))
            # Kept for __exit__. If a step above fails, `undo` closes the others and the terminal is usable again.
            self._undo = undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._undo.close()

    def __call__(self, event: Any) -> None:
        """Receive an event of the job or of the run."""
        if self._view is not None:
            self._view.take(event)
        if isinstance(event, AlarmEvent):
            self.info(f"warning: {event.text}; {event.advice}")
        elif self._view is None and isinstance(event, StepEvent) and event.shown:
            self.info(console_line(event.step, {name: event.metrics[name] for name in event.shown}))

    def info(self, line: str) -> None:
        """Print a line for the user, above the view if there is one."""
        if self._view is not None:
            self._view.info(line)
            return
        try:
            print(line, file=self._out, flush=True)
        # A pipe whose reader has ended, or a file on a full disk. The training continues without output.
        except OSError as error:
            # Replaced by /dev/null, so that neither later lines nor Python's flush at the exit fail again.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._out.fileno())
            os.close(nowhere)
            logger.warning("the output cannot be written any more, and the run continues without it: %s", error)


class _Lines(io.TextIOBase):
    """A replacement of sys.stdout that passes complete lines to a function."""

    def __init__(self, info: Callable[[str], None]) -> None:
        self._info = info
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._info(line)
        return len(text)

    def end(self) -> None:
        """Pass on the last line if it has no newline character."""
        if self._begun:
            self.write("\n")


def _is_terminal(stream: Any) -> bool:
    """Return True if the stream is a terminal that can show frames, and the run is not in CI."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("CI")
