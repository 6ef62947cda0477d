"""The live view of a run on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins.live_view.run_view import RunView
from plugins.live_view.screen import Screen


class LiveView:
    """Draws a `RunView` on a `Screen`; see `TerminalView`."""

    def __init__(self, title: str, roles: Mapping[str, int], began: float, terminal: int, encoding: str) -> None:
        """See `ViewType`."""
        self._view = RunView(title, roles, began)
        self._screen = Screen(terminal, self._view.frame, encoding)

    def take(self, event: Any) -> None:
        """See `TerminalView.take`."""
        self._view.take(event)

    def info(self, line: str) -> None:
        """See `TerminalView.info`."""
        self._screen.info(line)

    def close(self) -> None:
        """See `TerminalView.close`."""
        self._screen.close()
