"""Readers of data by what a source is: a file by its type, a folder, or a data set on the hub."""

from __future__ import annotations

import re
from pathlib import Path

JSON_TYPES = (".json", ".jsonl")
"""Types of files that need no plug-in."""
FILE_TYPES = (*JSON_TYPES, ".parquet", ".csv", ".arrow")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def split_source(source: str | Path) -> tuple[str, str | None, Path]:
    """Return the name of a source, the folder inside it that is named after an `@`, and the path."""
    name = str(source)
    data_dir: str | None = None
    path = Path(name).expanduser()
    # A path may contain an @ itself.
    if "@" in name and not path.exists():
        name, data_dir = name.rsplit("@", 1)
        path = Path(name).expanduser()
        # OpenRLHF's form json@FOLDER.
        if f".{name}" in FILE_TYPES and Path(data_dir).expanduser().is_dir():
            return name, None, Path(data_dir).expanduser()
    return name, data_dir, path


def file_type(path: Path) -> str:
    """Return the extension of the file type, without .gz."""
    return Path(path.name.removesuffix(".gz")).suffix


def is_path(name: str) -> bool:
    """Return True for a name that is not one of the hub."""
    return file_type(Path(name)) in FILE_TYPES or name.startswith(("/", ".", "~")) or not _HUB_NAME.fullmatch(name)
