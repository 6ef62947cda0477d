"""What the scripts of this folder share: rows in verl's format, and parquet files of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from components.data.readers import FILE_TYPES
from components.data.records import read_records

MakeRow = Callable[[dict[str, Any], str, int, str], dict[str, Any]]
"""(record, split, its number in the split, data source) -> row."""


def verl_row(
    source: str, prompt: str | list[dict[str, str]], truth: Any, *, ability: str, style: str = "rule", **extra: Any
) -> dict[str, Any]:
    """A row to write; `extra` is its extra_info, and a text becomes a user's message."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": truth},
        "extra_info": extra,
    }


def arguments_of(described: str | None, name: str, given: str, source: str) -> argparse.ArgumentParser:
    """The command line of a script that writes such files; see `preprocess`."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=described, formatter_class=style, allow_abbrev=False)
    own = f"a folder with a file for each split, one file, or a name on the hub; default {given}"
    parser.add_argument("--input", "--local_dataset_path", default=given, help=own)
    parser.add_argument("--data_source", default=source, help="what the rows have; picks the reward function")
    parser.add_argument("--local_dir", "--local_save_dir", default=f"~/data/{name}", help="where the files go")
    parser.add_argument("--only", help="write one of the files alone, as test")
    return parser


def preprocess(options: argparse.Namespace, make_row: MakeRow, splits: Mapping[str, str] | None = None) -> int:
    """Write a parquet file for each split, by default train and test; returns the exit code.

    Args:
        options: of `arguments_of`.
        make_row: makes the rows.
        splits: name of the file -> split of the input.
    """
    import pyarrow.parquet

    folder, splits = Path(options.local_dir).expanduser(), splits or {"train": "train", "test": "test"}
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


def _read_split(given: str, split: str) -> list[dict[str, Any]]:
    files = [Path(given).expanduser() / f"{split}{ending}" for ending in FILE_TYPES]
    found = next((file for file in files if file.is_file()), None)
    return read_records(given, split=split) if found is None else read_records(found)


def _made(make_row: MakeRow, record: dict[str, Any], split: str, number: int, source: str) -> dict[str, Any]:
    try:
        return make_row(record, split, number, source)
    except (KeyError, ValueError) as error:
        reason = f"there is no field {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{split}, row {number}, with the fields {', '.join(record)}: {reason}") from error
