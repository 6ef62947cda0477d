"""Table of a rehearsal: each rehearsed part with its verdict, and the parts that cannot be rehearsed."""

from __future__ import annotations

import shutil
import sys
import textwrap
from dataclasses import dataclass, field

from training.terminal.view import printable

PASSED = "ok"
DOUBTFUL = "look"
FAILED = "FAIL"
UNTRIED = "-"
"""Verdicts. A single FAILED part makes the result a no-go."""
COLUMNS = 80
"""Maximum width of the table."""
_NAME = 15
_VERDICT = 6
_MOST_LINES = {PASSED: 4, DOUBTFUL: 8, FAILED: 16, UNTRIED: 6}
"""Maximum number of lines of a row, by its verdict."""


class PartFailedError(ValueError):
    """Raised if a part of a rehearsal fails. The message says what was found and what to set."""


@dataclass(frozen=True)
class Row:
    """One part of a rehearsal."""

    name: str
    verdict: str
    text: str


@dataclass
class Table:
    """Rows of a rehearsal, printed one by one as soon as they are known."""

    recipe: str
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, verdict: str, text: str) -> None:
        """Add a row, and print it."""
        self.rows.append(Row(name, verdict, text))
        for line in self._lines_of(self.rows[-1]):
            print(line, flush=True)

    def passed(self, name: str, text: str) -> None:
        """Add a part that works."""
        self.add(name, PASSED, text)

    def untried(self, name: str, text: str) -> None:
        """Add a part that cannot be rehearsed here."""
        self.add(name, UNTRIED, text)

    def begin(self, folder: object) -> None:
        """Print the heading."""
        print(f"{self.recipe}: rehearsal in {folder}", file=sys.stderr, flush=True)
        print(f"{'part':<{_NAME}} {'result':<{_VERDICT}} details")

    @property
    def code(self) -> int:
        """Exit code: 0 for go, 1 for no-go."""
        return int(any(row.verdict == FAILED for row in self.rows))

    def conclude(self, seconds: float) -> int:
        """Print go or no-go. Return the exit code."""
        failed = [row.name for row in self.rows if row.verdict == FAILED]
        doubtful = [row.name for row in self.rows if row.verdict == DOUBTFUL]
        text = "GO: every rehearsed part works"
        if failed:
            text = f"NO-GO: {', '.join(failed)}"
        if doubtful:
            text += f"; look at: {', '.join(doubtful)}"
        for line in textwrap.wrap(f"{text} ({seconds:.0f} s)", self._width):
            print(line, flush=True)
        return self.code

    def text(self) -> str:
        """Return all rows as text."""
        return "\n".join(line for row in self.rows for line in self._lines_of(row)) + "\n"

    @property
    def _width(self) -> int:
        return min(COLUMNS, shutil.get_terminal_size((COLUMNS, 0)).columns)

    def _lines_of(self, row: Row) -> list[str]:
        indent = _NAME + _VERDICT + 2
        text = printable(" ".join(row.text.split()))
        # A wider terminal gets no wider table, so that the output can be pasted anywhere.
        lines = textwrap.wrap(text, self._width - indent, max_lines=_MOST_LINES[row.verdict], placeholder=" ...") or [
            ""
        ]
        head = f"{row.name:<{_NAME}} {row.verdict:<{_VERDICT}} {lines[0]}"
        return [head, *(" " * indent + line for line in lines[1:])]
