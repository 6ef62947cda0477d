"""Limit on the unpacked size of a file of rows, so that a small file cannot exhaust the memory."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

LIMIT_VARIABLE = "TROUPE_MAX_UNPACKED_GB"
"""Environment variable that sets the limit for every file, in GB."""
LIMIT_BYTES = 2**30
"""Number of bytes that any file may unpack to."""
LIMIT_RATIO = 50
"""Number of times its size that a large file may unpack to."""
_PART = 2**24
"""Number of unpacked bytes that are read at once from a gzipped file."""


class Allowance:
    """Counter of the bytes that a file unpacks to, with a limit."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: the packed file, whose size sets the limit.

        Raises:
            ValueError: the environment variable of the limit is not a positive number.
        """
        self._path = path
        self._count = 0
        # A ratio alone would refuse small files of repeated text, and a fixed size alone every large file.
        self._limit = max(LIMIT_BYTES, LIMIT_RATIO * path.stat().st_size)
        if setting := os.environ.get(LIMIT_VARIABLE):
            try:
                self._limit = int(float(setting) * 1e9)
            except (ValueError, OverflowError):
                self._limit = 0
            if self._limit <= 0:
                raise ValueError(f"{LIMIT_VARIABLE}={setting} must be a positive number of GB; set it, or unset it")

    def add(self, count: int) -> None:
        """Add to the number of bytes.

        Raises:
            ValueError: the number exceeds the limit.
        """
        # Counted before the part is kept, so that memory never exceeds the limit by more than one part.
        self._count += count
        if self._count > self._limit:
            raise ValueError(
                f"its {self._path.stat().st_size:,} bytes unpack to {self._count / 1e9:.1f} GB or more, above the "
                f"limit of {self._limit / 1e9:.1f} GB; if the file is right, set {LIMIT_VARIABLE} higher"
            )


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked if it is gzipped."""
    if path.suffix != ".gz":
        return path.read_bytes()
    # In parts, so that a small file that unpacks to terabytes is refused before it fills the memory.
    allowance = Allowance(path)
    parts: list[bytes] = []
    with gzip.open(path) as file:
        while part := file.read(_PART):
            allowance.add(len(part))
            parts.append(part)
    return b"".join(parts)
