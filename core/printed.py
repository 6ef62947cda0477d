"""Standard output of a process of the job. Lines printed by user code are also shown at the driver's terminal."""

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
    """Text stream that replaces `sys.stdout`.

    Lines written by user code are passed to `show`, prefixed with the name of the workload, up to 20 lines per 10
    seconds. Further lines are only counted, and the count is shown. All text, including that of libraries, is written
    to the log.

    Args:
        name: name of the process, the prefix of lines printed outside of any workload.
        show: callback that shows one line at the terminal.
        path: path to the log file, or None.
        log: the open log. None opens `path` at the first write.
        rest: stream for the text of libraries, if several workloads share one output.
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
        # Per thread, because the parts of lines that two threads print at the same time would be mixed.
        self._partial = threading.local()
        self._window_began = 0.0
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rest or self._log, name)

    def flush(self) -> None:
        """Flush the underlying streams."""
        for stream in (self._rest, self._log):
            if stream is not None:
                stream.flush()

    def close(self) -> None:
        """Close the log file if this object opened it."""
        if self._rest is not None and self._log is not None:
            self._log.close()
            self._log = None

    def write(self, text: str) -> int:
        """Write to the log. If the caller is user code, show the lines that this text completes."""
        if self._log is None and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._log = self._path.open("a", encoding="utf-8", buffering=1)
        if self._log is not None:
            self._log.write(text)
        caller = sys._getframe(1)
        # Once Ray's progress bars were used in the process, Ray replaces `print` by its own function. The caller is
        # then one frame further up. Otherwise the frame of Ray would be taken for the caller.
        if caller.f_code.co_filename.endswith("tqdm_ray.py") and caller.f_back is not None:
            caller = caller.f_back
        if is_library(caller.f_code.co_filename):
            if self._rest is not None:
                self._rest.write(text)
        elif os.getpid() == self._pid:  # a forked child would write into its parent's connection
            *lines, self._partial.text = (getattr(self._partial, "text", "") + text).split("\n")
            for line in lines:
                self._show_line(line)
        return len(text)

    def _show_line(self, line: str) -> None:
        if time.monotonic() - self._window_began > _WINDOW_S:
            self.show_count()
            self._window_began = time.monotonic()
        self._count += 1
        name = running_name() or self._name
        if self._count <= _LINES:
            if len(line) > _LONGEST_LINE:
                line = f"{line[:_LONGEST_LINE]} ... and {len(line) - _LONGEST_LINE} characters more"
            self._show(f"{name}: {line}")
        elif self._count == _LINES + 1:
            text = f"{name} has printed more than {_LINES} lines in {_WINDOW_S:g} s; further lines are only counted"
            if self._path is not None:
                text += f"; all are in {self._path}"
            self._show(text)

    def show_count(self) -> None:
        """Show the number of lines hidden since the last count, and reset it."""
        hidden = self._count - _LINES
        self._count = 0
        if hidden > 0:
            self._show(f"{self._name}: {hidden} printed lines were not shown")
