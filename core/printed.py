"""Standard output of a process of the job: lines that user code prints are shown at the driver's terminal too."""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from core.context import running_name

_LINES = 20
_WINDOW_S = 10.0
_LONGEST_LINE = 2000
_LIBRARIES = (sysconfig.get_path("stdlib"), "<frozen")


def is_library(path: str) -> bool:
    """True for a source file of Python's standard library or of an installed package."""
    return "site-packages" in path or "dist-packages" in path or path.startswith(_LIBRARIES)


class PrintedLines:
    """A text stream that takes the place of `sys.stdout`.

    Lines written by user code are passed to `show` behind the name of the workload: at most 20 in 10 seconds. Further
    lines are counted, and the count is shown. All text, of libraries too, is written to the log.

    Args:
        name: of the process, for lines that are printed outside of any workload.
        show: shows one line at the terminal.
        path: the log file, or None.
        log: the open log; None opens `path` when something is written.
        rest: takes the text of libraries, where several workloads share one output.
    """

    def __init__(
        self,
        name: str,
        show: Callable[[str], None],
        path: Path | None,
        log: TextIO | None = None,
        rest: TextIO | None = None,
    ) -> None:
        self._name = name
        self._show = show
        self._path = path
        self._log = log
        self._rest = rest
        self._pid = os.getpid()
        self._open = threading.local()  # two threads may each print half a line
        self._window_began = 0.0
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rest or self._log, name)

    def flush(self) -> None:
        """Flush all text that is written elsewhere."""
        for stream in (self._rest, self._log):
            if stream is not None:
                stream.flush()

    def close(self) -> None:
        """Close the log file, if it was opened here."""
        if self._rest is not None and self._log is not None:
            self._log.close()
            self._log = None

    def write(self, text: str) -> int:
        """Write to the log; show the lines that this text completes, if user code has called."""
        if self._log is None and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._log = self._path.open("a", encoding="utf-8", buffering=1)
        if self._log is not None:
            self._log.write(text)
        caller = sys._getframe(1)
        # Ray replaces `print` by a function of its own once its progress bars were used in the process.
        if caller.f_code.co_filename.endswith("tqdm_ray.py") and caller.f_back is not None:
            caller = caller.f_back
        if is_library(caller.f_code.co_filename):
            if self._rest is not None:
                self._rest.write(text)
        elif os.getpid() == self._pid:  # a forked child has no connection of its own
            *lines, self._open.line = (getattr(self._open, "line", "") + text).split("\n")
            for line in lines:
                self._take(line)
        return len(text)

    def _take(self, line: str) -> None:
        if time.monotonic() - self._window_began > _WINDOW_S:
            self.show_count()
            self._window_began = time.monotonic()
        self._count += 1
        name = running_name() or self._name
        if self._count <= _LINES:
            rest = len(line) - _LONGEST_LINE
            self._show(f"{name}: {line[:_LONGEST_LINE]}" + (f" ... and {rest} characters more" if rest > 0 else ""))
        elif self._count == _LINES + 1:
            where = f"; all are in {self._path}" if self._path is not None else ""
            limit = f"{_LINES} lines in {_WINDOW_S:g} s"
            self._show(f"{name} has printed more than {limit}; further lines are only counted{where}")

    def show_count(self) -> None:
        """Show how many lines were not shown since the last count."""
        hidden, self._count = self._count - _LINES, 0
        if hidden > 0:
            self._show(f"{self._name}: {hidden} printed lines were not shown")
