"""Headers of safetensors files, read with limits: a damaged or hostile file raises an error before it can take minutes
or gigabytes.

This module does not import torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MOST_HEADER_BYTES = 100_000_000
"""Maximum size of a header in bytes, as the safetensors format defines it."""
MOST_TENSORS = 100_000
"""Maximum number of tensors in a file. The largest published models have fewer in all files together, or little
more."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_header(file: int) -> tuple[int, dict[str, dict[str, Any]]]:
    """Read the header of an open safetensors file.

    Args:
        file: descriptor of the file.

    Returns:
        The offset of the first tensor in bytes; `dtype`, `shape` and `data_offsets` of each tensor by name.

    Raises:
        ValueError: the file is truncated, or its header is invalid.
    """
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if size < 8 or length > size - 8:
        raise ValueError(f"its header has {length} bytes, and the file {size}")
    if length > MOST_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes; {MOST_HEADER_BYTES} are the most that the format allows")
    text = os.pread(file, length, 8)
    tensors = text.count(b'"data_offsets"')
    if tensors > MOST_TENSORS:
        raise ValueError(f"its header names {tensors} tensors; a file has {MOST_TENSORS} at most")
    try:
        entries = json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    except ValueError as error:  # of the JSON or of its encoding
        raise ValueError(f"its header cannot be used: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"its header is a {type(entries).__name__}, not an object")
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if not _is_entry(entry):
            raise ValueError(f"its header has no dtype, shape and data_offsets for {name!r:.100}, but {entry!r:.100}")
    return 8 + length, entries


def check_data(entries: dict[str, dict[str, Any]], start: int, size: int) -> None:
    """Check that the tensors of a file are contiguous and end at the end of the file.

    Args:
        entries: entries of the header, from `read_header`.
        start: offset of the first tensor in bytes.
        size: size of the file in bytes.

    Raises:
        ValueError: the file is truncated or damaged.
    """
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        if first != end:
            raise ValueError(f"{name!r:.100} begins at byte {first} of the data, where {end} is expected")
        end = last
    if size != start + end:
        raise ValueError(f"its header describes {start + end} bytes, and the file has {size}")


def index_of(folder: Path) -> dict[str, str] | None:
    """Return the file name of each tensor from the index of a model's folder, or None without an index.

    Raises:
        ValueError: the index is damaged, or names files outside the folder.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        files = index["weight_map"]
        if not isinstance(files, dict):
            raise TypeError(f"weight_map is a {type(files).__name__}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of weights: {error!r:.100}") from error
    for file in set(map(str, files.values())):
        # An index from the hub must not make the process read files outside of the model's folder.
        if Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"{path} names {file!r:.100}; it may only name files of its own folder")
    return files


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in entries if names.count(name) > 1)
        raise ValueError(f"{twice!r:.100} is in it twice")
    return entries


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    if not isinstance(entry.get("dtype"), str):
        return False
    numbers = [*shape, *offsets]
    return all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers) and offsets[0] <= offsets[1]
