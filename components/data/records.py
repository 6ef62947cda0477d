"""Rows from a file, a folder, or a data set of the Hugging Face hub.

The libraries that read them are imported inside the functions, because a recipe's `main.py` checks its inputs before it
starts anything that takes long.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.data.cells import keep_spelling, kind_of, rows_of
from components.data.data_folders import folder_files
from components.data.sources import source_forms
from components.data.unpacking import ipc_batches, parquet_batches, read_bytes
from components.net.hub import first_line, why_unreachable

FILE_TYPES = (".json", ".jsonl", ".parquet", ".csv", ".arrow")
"""Extensions of the files that can be read."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Escape of a surrogate, which may be half of a character, in JSON text."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Name of a data set on the hub."""


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
    name = str(source)
    data_dir: str | None = None
    path = Path(name).expanduser()
    # A path may contain an @ itself.
    if "@" in name and not path.exists():
        name, data_dir = name.rsplit("@", 1)
        path = Path(name).expanduser()
        # OpenRLHF's form json@FOLDER.
        if f".{name}" in FILE_TYPES and Path(data_dir).expanduser().is_dir():
            path = Path(data_dir).expanduser()
            data_dir = None
    if path.is_dir():
        records = _read_folder(path, data_dir, split, label_key)
    elif path.is_file():
        if split != "train" or data_dir is not None:
            raise ValueError(
                f"data file {str(source)!r} has one split, 'train', and no folders; found split={split!r}: unset it, "
                "or give a folder with a file for each split"
            )
        records = _read_file(path, label_key)
    elif _type_of(path) in FILE_TYPES or name.startswith(("/", ".", "~")) or not _HUB_NAME.fullmatch(name):
        types = ", ".join(FILE_TYPES)
        raise ValueError(f"data file {str(source)!r} does not exist; give a {types} file, a folder, {source_forms()}")
    else:
        records = _read_hub(name, data_dir, split)
    if not isinstance(records, list) or not records:
        raise ValueError(f"data {str(source)!r} must hold a list of at least one object; it holds {kind_of(records)}")
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise ValueError(f"data {str(source)!r}, row {number}: expected an object, found {kind_of(record)}")
    return [{name: cell for name, cell in record.items() if cell is not None} for record in records]


def _type_of(path: Path) -> str:
    """Return the extension of the file type, without .gz."""
    if path.suffix == ".gz":
        path = path.with_suffix("")
    return path.suffix


def _read_file(path: Path, label_key: str | None) -> Any:
    kind = _type_of(path)
    if kind not in FILE_TYPES:
        raise ValueError(f"data file {str(path)!r} is none of {', '.join(FILE_TYPES)}; convert it to one of them")
    try:
        return _read_json(path, label_key) if kind in (".json", ".jsonl") else _read_table(path)
    except MemoryError as error:
        raise ValueError(f"data file {str(path)!r} does not fit into memory; split it, or use fewer rows") from error


def _read_json(path: Path, label_key: str | None) -> Any:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"data file {str(path)!r} cannot be read as UTF-8 text ({error}); convert it") from error
    except ValueError as error:  # the file unpacks to more than the limit
        raise ValueError(f"data file {str(path)!r} cannot be read: {error}") from error
    if _type_of(path) == ".json":
        try:
            return _parse_json(text, str(path), label_key)
        except ValueError as error:
            # Many .json files contain JSON lines, whose second line is extra data to the parser.
            if "Extra data" not in str(error):
                raise
    # splitlines() would also split at other line separators, which a JSON string may contain.
    lines = enumerate(text.split("\n"), 1)
    return [_parse_json(line, f"{path}, line {n}", label_key) for n, line in lines if line.strip()]


def _read_table(path: Path) -> list[dict[str, Any]]:
    # Imported here: most runs read no table, and pyarrow is the slowest import before an error message.
    import pyarrow

    batches = {".parquet": parquet_batches, ".csv": _csv_batches}.get(_type_of(path), ipc_batches)
    try:
        return rows_of(batches(path))
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"data file {str(path)!r} cannot be read ({first_line(error)}); replace it") from error


def _csv_batches(path: Path) -> list[Any]:
    import pyarrow
    import pyarrow.csv

    content = read_bytes(path)
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    # The file is one block: pyarrow cannot read a row that spans three blocks or more, and prompts can be long.
    read = pyarrow.csv.ReadOptions(block_size=min(max(len(content), 2**20), 2**31 - 1))
    # All cells are text: a label such as 0.50, 007 or a date is compared with the text that the model writes.
    # UTF-8 is checked later, where the error can name the row.
    convert = pyarrow.csv.ConvertOptions(default_column_type=pyarrow.string(), check_utf8=False)
    return pyarrow.csv.read_csv(pyarrow.BufferReader(content), read, parse, convert).to_batches()


def _read_folder(folder: Path, data_dir: str | None, split: str, label_key: str | None) -> list[Any]:
    path = folder / (data_dir or "")
    try:
        with _quiet():
            files = folder_files(folder, data_dir, FILE_TYPES)
    except Exception as error:  # `datasets`, which infers the splits, may raise any exception
        raise ValueError(
            f"data folder {str(path)!r}, split {split!r}, cannot be read ({first_line(error)}); give a folder with "
            f"{', '.join(FILE_TYPES)} files, or one that save_to_disk wrote"
        ) from error
    if split not in files:
        raise ValueError(f"data folder {str(path)!r} has no split {split!r}; set one of: {', '.join(map(repr, files))}")
    records: list[Any] = []
    for file in files[split]:
        rows = _read_file(file, label_key)
        if not isinstance(rows, list):
            raise ValueError(f"data file {str(file)!r} must hold a list of objects; it holds {kind_of(rows)}")
        records += rows
    return records


def _read_hub(name: str, data_dir: str | None, split: str) -> list[dict[str, Any]]:
    import datasets
    from datasets import config
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    # The setting is global in `datasets`, so it must be restored in any case.
    was_offline = config.HF_HUB_OFFLINE
    reason = None
    with _quiet():
        try:
            if name in _PACKAGED_DATASETS_MODULES:
                # `datasets` would read all files of this type in the working directory.
                raise ValueError("it is the name of a file type")
            reason = why_unreachable(name, "dataset")
            # Offline, `datasets` would otherwise retry for half a minute before it reads its cache.
            config.HF_HUB_OFFLINE = was_offline or reason is not None
            loaded: Any = datasets.load_dataset(name, data_dir=data_dir, split=split).with_format("arrow")
            return rows_of(loaded[:].to_batches())
        except Exception as error:  # file readers and HTTP clients may raise any exception
            raise ValueError(
                f"there is no file or folder {name!r} here, and the hub did not give a data set of that name, split "
                f"{split!r} ({reason or _reason(error)}); give a {', '.join(FILE_TYPES)} file, a folder, "
                f"{source_forms()}"
            ) from error
        finally:
            config.HF_HUB_OFFLINE = was_offline


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable progress bars and log messages of the libraries. Errors contain the relevant information."""
    import datasets
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    # Levels are saved, because the user may have set them.
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars = datasets.is_progress_bar_enabled(), not are_progress_bars_disabled()
    datasets.disable_progress_bars()
    disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
        if bars[0]:
            datasets.enable_progress_bars()
        if bars[1]:
            enable_progress_bars()


def _reason(error: BaseException) -> str:
    """Return the first line of an error's message, without the wrapper of `datasets`, which has no details."""
    from datasets.exceptions import DatasetGenerationError

    while isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


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
    return value if isinstance(value, list) else [value]


def _lone_surrogate(value: Any) -> str:
    """Return the first lone surrogate in the texts of a value, or an empty text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return error.object[error.start]
    return ""
