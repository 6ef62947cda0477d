"""Conversion of values to JSON, durations as text, and files of a run, which a killed process may leave incomplete."""

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
    """Convert tensors and arrays to numbers and lists, at any depth, and values of other types to text.

    Keys and tokens in texts are redacted. NaN and infinities are not changed.
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
    """Return the values of nested mappings by dotted name. An empty mapping is a value."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping) and len(value) > 0
        leaves |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return leaves


def finite(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace NaN and infinities in plain values by None, at any depth.

    Returns:
        The changed record, and the top-level names whose values contained NaN or an infinity.
    """
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
    """Return plain values as one line of JSON. NaN and infinities become null, and `nonfinite` lists their names."""
    cleaned, nonfinite = finite(record)
    # Python would write NaN, which is not valid JSON, so that other programs could not read the line.
    if nonfinite:
        cleaned["nonfinite"] = nonfinite
    return json.dumps(cleaned, allow_nan=False) + "\n"


def json_lines(path: Path, beginning: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file with one object per line. A missing file has none.

    Lines that are not a JSON object are skipped, such as the incomplete last line of a killed process.

    Args:
        path: path of the file.
        beginning: only lines that start with these bytes are parsed.
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
    """Return the object of a JSON file. Empty if the file is missing, or damaged by a loss of power."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        logger.warning("%s cannot be read, and its content is lost: %s", path, error)
        return {}
    return content if isinstance(content, dict) else {}


def duration(seconds: float) -> str:
    """Return a duration as text with two units at most: `12 s`, `3 min 05 s`, `1 h 02 min`, `3 d 04 h`."""
    whole = max(0, round(seconds))
    for unit, size, part, smaller in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller:02d} {part}"
    return f"{whole} s"


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees either the old text or the new one."""
    # The process id, because the driver and the trainer both write summary.json.
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


class GrowingFile:
    """A file that is only appended to, without a buffer in this process."""

    def __init__(self, path: Path) -> None:
        """Open the file at its end."""
        # With a buffer, bytes of a failed write would be written again by `close`.
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append all of the bytes.

        Raises:
            OSError: the disk is full or fails.
        """
        # An unbuffered write may accept only a part of the bytes, for example on a disk that is almost full.
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close the file. A second call has no effect."""
        self._file.close()


def _ends_a_line(path: Path) -> bool:
    if path.stat().st_size == 0:
        return True
    with path.open("rb") as reader:
        reader.seek(-1, os.SEEK_END)
        return reader.read(1) == b"\n"


class LineFile(GrowingFile):
    """A growing text file with one record per line."""

    def __init__(self, path: Path) -> None:
        """Open the file, and terminate an incomplete line that a killed process has left."""
        super().__init__(path)
        # Otherwise the first new record would continue the incomplete line, and a reader would skip both.
        if not _ends_a_line(path):
            self.add("\n")

    def add(self, line: str) -> None:
        """Append a line, which includes its newline character."""
        self.write(line.encode())
