"""A terminal's screen: lines that scroll up, and below them a frame that is drawn again and again.

rich renders the frame. rich.live is not used: it draws for every line, in the thread that prints it, and leaves parts
of a frame behind in a window that becomes narrower.
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
"""Lines that come faster than this are drawn together."""
_LINES_KEPT = 10_000
"""Of those that wait while the terminal takes nothing (Ctrl-S, a network that hangs); the oldest go."""
_LAST_FRAME_WITHIN_S = 5.0


class Screen:
    """Draws on a thread of its own: who says a line neither waits for the terminal nor fails with it.

    Not rich.live, which writes the frame once more with each line that is said, in the thread that says it, and leaves
    parts of it behind when the window becomes narrower.
    """

    def __init__(self, terminal: int, frame: Callable[[int, int], list[Text]], encoding: str) -> None:
        """Begin to draw.

        Args:
            terminal: file descriptor of the terminal, closed by `close`.
            frame: (width, height) -> what stands below the lines now, within so many cells.
            encoding: of the terminal.
        """
        self._file = os.fdopen(terminal, "w", encoding=encoding, errors="backslashreplace")
        self._console = Console(file=self._file, highlight=False, markup=False, emoji=False)
        self._frame = frame
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._below: list[int] = []
        """Cells in each line of the frame that stands there."""
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._draw_on, name="troupe-screen", daemon=True)
        self._thread.start()

    def info(self, line: str) -> None:
        """Let a line scroll up above the frame."""
        self._lines.append(line)
        self._wake.set()

    def close(self) -> None:
        """Draw the lines and the frame a last time, and leave them there."""
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
        except OSError as error:  # the terminal has gone
            logger.warning("the terminal is written to no more: %s", error)

    def _draw(self) -> None:
        columns, rows = self._size()
        try:
            frame = self._frame(columns - 1, rows - 1)
        # A defect of ours, which must not take the lines along.
        except Exception:
            logger.warning("the view of the run failed and is switched off", exc_info=True)
            self._frame = lambda *_: []
            frame = []
        # A window that became narrower has broken long lines of the last frame in several.
        up = sum(max(1, math.ceil(cells / columns)) for cells in self._below)
        text = io.StringIO()
        text.write((f"\x1b[{up}A" if up else "") + "\r")
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
