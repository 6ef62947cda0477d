"""Screen of a terminal: lines that scroll up, and below them a frame that is redrawn.

rich renders the frame. rich.live is not used. It draws the frame again for every line, in the thread that prints the
line, and leaves parts of a frame behind when the window becomes narrower.
"""

from __future__ import annotations

import io
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from training.terminal.view import printable

logger = logging.getLogger(__name__)

FRAME_EVERY_S = 0.5
_AT_MOST_EVERY_S = 0.1
"""Minimum number of seconds between two drawings. Lines that arrive within this time are drawn together."""
_LINES_KEPT = 10_000
"""Maximum number of lines that wait while the terminal accepts no output (Ctrl-S, a hanging network). The oldest lines
are dropped."""
_LAST_FRAME_WITHIN_S = 5.0
"""Maximum number of seconds that `close` waits for the last frame."""


class Screen:
    """Draws in a separate thread, so that a caller of `info` neither waits for the terminal nor fails with it."""

    def __init__(self, terminal: int, frame: Callable[[int, int], list[Text]], encoding: str) -> None:
        """Start to draw.

        Args:
            terminal: file descriptor of the terminal. `close` closes it.
            frame: (width, height) -> lines of the frame, which fit into that number of cells.
            encoding: encoding of the terminal.
        """
        self._file = os.fdopen(terminal, "w", encoding=encoding, errors="backslashreplace")
        self._console = Console(file=self._file, highlight=False, markup=False, emoji=False)
        self._frame = frame
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._below: list[int] = []
        """Number of cells in each line of the frame on the screen."""
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._draw_on, name="troupe-screen", daemon=True)
        self._thread.start()

    def info(self, line: str) -> None:
        """Print a line above the frame."""
        self._lines.append(line)
        self._wake.set()

    def close(self) -> None:
        """Draw the lines and the frame for the last time. They stay on the screen."""
        self._closing.set()
        self._wake.set()
        self._thread.join(_LAST_FRAME_WITHIN_S)

    def _draw_on(self) -> None:
        try:
            while not self._closing.wait(_AT_MOST_EVERY_S):
                self._draw()
                self._wake.wait(FRAME_EVERY_S)
                self._wake.clear()
            self._draw()
            self._file.close()
        except OSError as error:  # the terminal was closed
            logger.warning("the live view stops: the terminal cannot be written to (%s)", error)

    def _draw(self) -> None:
        columns, rows = self._size()
        try:
            frame = self._frame(columns - 1, rows - 1)
        # A defect in the view must not stop the output of lines, so the frame is switched off instead.
        except Exception:
            logger.warning("the view of the run failed and is switched off", exc_info=True)
            self._frame = lambda *_: []
            frame = []
        # If the window became narrower, the terminal has wrapped long lines of the last frame onto several lines.
        up = sum(max(1, math.ceil(cells / columns)) for cells in self._below)
        text = io.StringIO()
        if up:
            text.write(f"\x1b[{up}A")
        text.write("\r")
        if self._lines:
            text.write("\x1b[J")
            while self._lines:
                text.write(printable(self._lines.popleft()) + "\n")
        with self._console.capture() as captured:
            for line in frame:
                self._console.print(line, soft_wrap=True, end="\x1b[K\n")
        text.write(captured.get() + "\x1b[J")
        self._below = [line.cell_len for line in frame]
        self._file.write(text.getvalue())
        self._file.flush()

    def _size(self) -> tuple[int, int]:
        try:
            columns, rows = os.get_terminal_size(self._file.fileno())
        except OSError:
            columns = rows = 0
        return columns or 80, rows or 24
