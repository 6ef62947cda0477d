"""The contract of terminal views, and text that is safe to print on a terminal.

A plug-in provides a `ViewType` of the kind "terminal view". Without one, a run prints a line per step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

VIEW, LIVE = "terminal view", "live"
"""Kind of the plug-ins that provide terminal views, and name of the view that a run uses if a plug-in provides it."""


class TerminalView(Protocol):
    """A view of a run that is redrawn at the bottom of the terminal, with lines that scroll above it."""

    def take(self, event: Any) -> None:
        """Receive an event of core or of a run. Events of other types are ignored."""
        ...

    def info(self, line: str) -> None:
        """Print a line above the view."""
        ...

    def close(self) -> None:
        """Draw the lines and the view for the last time. They stay on the terminal."""
        ...


class ViewType(Protocol):
    """Constructor of a terminal view that a plug-in provides."""

    def __call__(
        self, title: str, roles: Mapping[str, int], began: float, terminal: int, encoding: str
    ) -> TerminalView:
        """Open a view.

        Args:
            title: first line of the view.
            roles: number of workers of each role.
            began: time at which the user started the run, in seconds since the epoch.
            terminal: file descriptor of the terminal. The view closes it.
            encoding: encoding of the terminal.
        """
        ...


def printable(text: str) -> str:
    """Replace characters that move the cursor or change how the terminal shows the text after them."""
    if text.isprintable():
        return text
    on_one_line = re.sub(r"\s", " ", text.replace("\n", "↵"))
    return "".join(character if character.isprintable() else "�" for character in on_one_line)
