"""Values as JSON knows them and as a person says them; the files of a run, written whole and read in any state."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from training.tracking.redaction import hide_in_text

logger = logging.getLogger(__name__)


def plain(value: Any) -> Any:
    """Turn tensors and arrays into numbers and lists, at any depth, and what JSON has no word for into text.

    Text comes out with keys and tokens hidden. NaN and infinities stay what they are.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    return hide_in_text(str(value))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted name; an empty mapping stands for itself."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping) and len(value) > 0
        leaves |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return leaves


def finite(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace NaN and infinities of plain values by None, at any depth, and list the top-level names that had one."""
    nonfinite: list[str] = []

    def clean(value: Any, top: str) -> Any:
        if isinstance(value, dict):
            return {name: clean(inner, top) for name, inner in value.items()}
        if isinstance(value, list):
            return [clean(inner, top) for inner in value]
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite.append(top)
            return None
        return value

    cleaned = {name: clean(value, name) for name, value in record.items()}
    return cleaned, list(dict.fromkeys(nonfinite))


def json_line(record: Mapping[str, Any]) -> str:
    """Write plain values as one line of JSON; what was NaN or infinite is null, and named in `nonfinite`."""
    cleaned, nonfinite = finite(record)
    # Python would write NaN, which is no JSON and breaks every other reader.
    if nonfinite:
        cleaned["nonfinite"] = nonfinite
    return json.dumps(cleaned, allow_nan=False) + "\n"


def json_lines(path: Path, beginning: bytes = b"") -> Iterator[dict[str, Any]]:
    """The objects of a file of lines, of those that begin so. Half a line of a killed process is passed over, and so is
    what is no JSON; a file that is not there has none.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.startswith(beginning):
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def json_object(path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty where there is none, or half of one, of a machine that lost power."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        logger.warning("%s cannot be read, and its content is lost: %s", path, error)
        return {}
    return content if isinstance(content, dict) else {}


def duration(seconds: float) -> str:
    """A time in words: `12 s`, `3 min 05 s`, `1 h 02 min`, `3 d 04 h`."""
    whole = max(0, round(seconds))
    for unit, size, part, smaller in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller:02d} {part}"
    return f"{whole} s"


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, so that no reader meets half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


class GrowingFile:
    """A file that is only appended to. What was written is on its way to the disk once a call returns."""

    def __init__(self, path: Path) -> None:
        """Open the file, behind what it holds."""
        # Without a buffer: after a failure nothing is left that would be tried again at the end.
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append all of the bytes. Raises OSError when they do not fit."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()


def _ends_a_line(path: Path) -> bool:
    if path.stat().st_size == 0:
        return True
    with path.open("rb") as reader:
        reader.seek(-1, os.SEEK_END)
        return reader.read(1) == b"\n"


class LineFile(GrowingFile):
    """A growing file of lines."""

    def __init__(self, path: Path) -> None:
        """Open the file, and end half a line that a killed process left."""
        super().__init__(path)
        if not _ends_a_line(path):
            self.add("\n")

    def add(self, line: str) -> None:
        """Append a line, which brings its own end."""
        self.write(line.encode())
