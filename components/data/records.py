"""Rows from a file, a folder, or a data set of the Hugging Face hub.

JSON is read here. A plug-in provides the readers of everything else: the `data file` of a file's type (`csv`) takes
its path, and the `data records` of `folder` and of `hub` take a folder or a name, a folder inside it, and a split.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

from components.data.cells import keep_spelling
from components.data.readers import FILE_TYPES, JSON_TYPES, file_type, is_path, split_source
from components.data.sources import source_forms
from components.data.unpacking import read_bytes
from components.data.values import kind_of
from components.registry import load

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of a surrogate, which may be half of a character, in JSON text."""


def read_records(source: str | Path, *, split: str = "train", label_key: str | None = None) -> list[dict[str, Any]]:
    """Read a list of objects with plain Python values.

    A column that is null in a row is absent from the row. Nested null fields are dropped in typed files (Parquet,
    Arrow, the hub), where every object has all fields. They stay in JSON files, where the author wrote them. Every cell
    of a CSV file is text.

    Args:
        source: a .json, .jsonl, .parquet, .csv or .arrow file, text files also gzipped (.jsonl.gz); a folder that
            `save_to_disk` of `datasets` wrote; a folder with data files whose names contain their split; or the name of
            a data set on the hub. `<folder>@<data_dir>` and `<name>@<data_dir>` read the files of a subfolder, and
            `json@<folder>` reads that folder.
        split: split of a folder or a data set. A file has only "train".
        label_key: column whose numbers keep their text in a JSON file, for `label_of`.

    Raises:
        ValueError: the source does not exist, cannot be read, has no such split, or holds no objects.
    """
    name, data_dir, path = split_source(source)
    if path.is_dir():
        records = load("data records", "folder", f"data={source!s}")(path, data_dir, split, label_key)
    elif path.is_file():
        if split != "train" or data_dir is not None:
            raise ValueError(
                f"data file {str(source)!r} has one split, 'train', and no folders; found split={split!r}: unset it, "
                "or give a folder with a file for each split"
            )
        records = read_file(path, label_key)
    elif is_path(name):
        types = ", ".join(FILE_TYPES)
        raise ValueError(f"data file {str(source)!r} does not exist; give a {types} file, a folder, {source_forms()}")
    else:
        records = load("data records", "hub", f"data={source!s}")(name, data_dir, split)
    if not isinstance(records, list) or not records:
        raise ValueError(f"data {str(source)!r} must hold a list of at least one object; it holds {kind_of(records)}")
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise ValueError(f"data {str(source)!r}, row {number}: expected an object, found {kind_of(record)}")
    return [{name: cell for name, cell in record.items() if cell is not None} for record in records]


def read_file(path: Path, label_key: str | None) -> Any:
    """Return the content of a data file; see `read_records`.

    Raises:
        ValueError: it cannot be read.
    """
    kind = file_type(path)
    if kind not in FILE_TYPES:
        raise ValueError(f"data file {str(path)!r} is none of {', '.join(FILE_TYPES)}; convert it to one of them")
    try:
        if kind in JSON_TYPES:
            return _read_json(path, label_key)
        return load("data file", kind.removeprefix("."), f"data={path}")(path)
    except MemoryError as error:
        raise ValueError(f"data file {str(path)!r} does not fit into memory; split it, or use fewer rows") from error


def _read_json(path: Path, label_key: str | None) -> Any:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"data file {str(path)!r} cannot be read as UTF-8 text ({error}); convert it") from error
    except ValueError as error:  # the file unpacks to more than the limit
        raise ValueError(f"data file {str(path)!r} cannot be read: {error}") from error
    if file_type(path) == ".json":
        try:
            return _parse_json(text, str(path), label_key)
        except ValueError as error:
            # Many .json files contain JSON lines, whose second line is extra data to the parser.
            if "Extra data" not in str(error):
                raise
    # splitlines() would also split at other line separators, which a JSON string may contain.
    lines = enumerate(text.split("\n"), 1)
    return [_parse_json(line, f"{path}, line {n}", label_key) for n, line in lines if line.strip()]


def _parse_json(text: str, where: str, label_key: str | None) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:  # invalid JSON, or a number with too many digits
        raise ValueError(f"{where}: not valid JSON ({error}); correct or remove it") from error
    except RecursionError:
        raise ValueError(f"{where}: its brackets are nested too deeply to be read; remove it") from None
    # json accepts a lone surrogate, but no tokenizer does.
    if _SURROGATE.search(text) and (surrogate := _lone_surrogate(value)):
        raise ValueError(f"{where}: \\u{ord(surrogate):04x} alone is not a character; correct or remove it")
    if label_key is not None:
        rows = _as_list(value)
        # Parsed a second time only if a label is a float, with its text in place of the number.
        keep_spelling(rows, label_key, lambda: _as_list(json.loads(text, parse_float=str)))
    return value


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value]


def _lone_surrogate(value: Any) -> str:
    """Return the first lone surrogate in the texts of a value, or an empty text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return error.object[error.start]
    return ""
