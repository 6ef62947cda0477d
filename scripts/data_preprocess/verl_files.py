"""Shared functions of the scripts in this folder: rows in verl's format, and their parquet files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from components.data.readers import FILE_TYPES
from components.data.records import read_records

MakeRow = Callable[[dict[str, Any], str, int, str], dict[str, Any]]
"""(record, split, index in the split, data source) -> row."""


def verl_row(
    source: str, prompt: str | list[dict[str, str]], truth: Any, *, ability: str, style: str = "rule", **extra: Any
) -> dict[str, Any]:
    """Return a row in verl's format.

    Args:
        source: value of `data_source`, which selects the reward function.
        prompt: messages, or the text of one user message.
        truth: ground truth of the reward function.
        ability: kind of task.
        style: `rule`, or `model` for a reward model.
        extra: content of `extra_info`.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": truth},
        "extra_info": extra,
    }


def arguments_of(description: str | None, name: str, default_input: str, source: str) -> argparse.ArgumentParser:
    """Return the command-line parser of a script of this folder; see `preprocess`.

    Args:
        description: text of --help.
        name: default folder of the files, in ~/data.
        default_input: hub name that is read by default.
        source: default of `data_source`.
    """
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=style, allow_abbrev=False)
    input_help = f"folder with a file for each split, a file, or a hub name (default: {default_input})"
    parser.add_argument("--input", "--local_dataset_path", default=default_input, help=input_help)
    source_help = "value of the column data_source, which selects the reward function (default: %(default)s)"
    parser.add_argument("--data_source", default=source, help=source_help)
    folder_help = "folder of the parquet files (default: %(default)s)"
    parser.add_argument("--local_dir", "--local_save_dir", default=f"~/data/{name}", help=folder_help)
    parser.add_argument("--only", help="write only this file, such as test (default: all)")
    return parser


def preprocess(options: argparse.Namespace, make_row: MakeRow, splits: Mapping[str, str] | None = None) -> int:
    """Write a parquet file for each split. Return the exit code: 0 written, 2 invalid input.

    Args:
        options: parsed options of `arguments_of`.
        make_row: converts a record into a row.
        splits: name of the file -> split of the input. Default: train and test.
    """
    import pyarrow.parquet

    folder = Path(options.local_dir).expanduser()
    splits = splits or {"train": "train", "test": "test"}
    try:
        if options.only not in (None, *splits):
            raise ValueError(f"--only {options.only}; use one of {', '.join(splits)}")
        for name, split in splits.items():
            if options.only in (None, name):
                records = enumerate(_read_split(options.input, split))
                rows = [_made(make_row, record, split, number, options.data_source) for number, record in records]
                folder.mkdir(parents=True, exist_ok=True)
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
                print(f"{len(rows)} rows in {folder / name}.parquet")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _read_split(source: str, split: str) -> list[dict[str, Any]]:
    """Read a split: the file of its name in a folder, or that split of a file or hub name."""
    for suffix in FILE_TYPES:
        file = Path(source).expanduser() / f"{split}{suffix}"
        if file.is_file():
            return read_records(file)
    return read_records(source, split=split)


def _made(make_row: MakeRow, record: dict[str, Any], split: str, number: int, source: str) -> dict[str, Any]:
    try:
        return make_row(record, split, number, source)
    except (KeyError, ValueError) as error:
        reason = str(error)
        if isinstance(error, KeyError):
            reason = f"there is no field {error}"
        raise ValueError(f"{split}, row {number}, with the fields {', '.join(record)}: {reason}") from error
