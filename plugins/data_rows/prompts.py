"""Rows of prompts from records: the prompt, the label, and all other columns for rewards and agents.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from components.data.cells import cell_at, label_of
from components.data.columns import column_note, likely_keys
from components.data.mixture import Note, first_rows
from components.data.prompt_rows import prompt_columns
from components.data.prompts import DEFAULT_DATASOURCE, DEFAULT_INPUT
from components.data.readers import FILE_TYPES, JSON_TYPES, file_type, is_path, split_source
from components.data.records import read_records
from components.data.values import check_one_kind
from components.registry import require


def check_reader(source: str) -> None:
    """Check that the reader of a source is there.

    Raises:
        MissingPlugin: no plug-in provides it.
    """
    name, _, path = split_source(source)
    if path.is_dir():
        require("data records", "folder")
    elif not path.is_file() and not is_path(name):
        require("data records", "hub")
    elif (kind := file_type(path)) in FILE_TYPES and kind not in JSON_TYPES:
        require("data file", kind.removeprefix("."))


def read_prompts(
    source: str,
    prompt_key: str,
    label_key: str | None,
    split: str,
    max_rows: int | None,
    note: Note | None,
    ignored: Collection[str],
) -> list[dict[str, Any]]:
    """Read the prompts of a source of `read_records`. See `load_rows` for the arguments.

    Raises:
        ValueError: the source cannot be read, or a row has no prompt or no label. The message names the row.
    """
    records = read_records(source, split=split, label_key=label_key)
    return read_rows(first_rows(records, max_rows, source, note), source, prompt_key, label_key, ignored)


def read_rows(
    records: list[dict[str, Any]], source: str, prompt_key: str, label_key: str | None, ignored: Collection[str]
) -> list[dict[str, Any]]:
    """Convert records to the rows of `load_rows`. `source` names them in error messages."""
    rows = []
    for number, record in enumerate(records):
        where = f"{source}, row {number}"
        if record.get(prompt_key) is None:
            raise _missing(prompt_key, label_key, record, where)
        policy_columns = prompt_columns(record, prompt_key, where, ignored, is_default=prompt_key == DEFAULT_INPUT)
        row = {"input": policy_columns["input"], "label": "", "datasource": DEFAULT_DATASOURCE}
        if label_key is not None:
            row["label"] = _label(record, label_key, where)
        if record.get("datasource") is not None:
            row["datasource"] = str(record["datasource"])
        if others := _other_columns(record, prompt_key, label_key, row["input"]):
            row["extra_info"] = others
        rows.append(row | policy_columns)
    check_one_kind((row["input"] for row in rows), source)
    return rows


def describe_columns(rows: Sequence[Mapping[str, Any]], used: Sequence[str]) -> str:
    """Describe in one line which columns of rows are used. `used` are the columns that options name."""
    others = (_extra_columns(row) for row in rows)
    read = [name for row in rows for name in row.get("columns", ())]
    return column_note([*used, *read], others, "only for rewards and agents")


def _extra_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns other than the prompt. A prompt of messages has a copy in them, see `_other_columns`."""
    columns = dict(row.get("extra_info") or {})
    if isinstance(row["input"], str):
        columns.pop("", None)  # the column of row numbers that pandas writes to CSV files has no name
    else:
        columns.pop("prompt", None)
    return columns


def _label(record: Mapping[str, Any], key: str, where: str) -> Any:
    """Return the label of a row from a column, or from a field of a column if the key has dots."""
    value = cell_at(record, key)
    if value is None:
        raise _missing_label(key, record, where)
    return label_of(value, f"{where}, column {key!r}", "label_key")


def _missing_label(key: str, record: Mapping[str, Any], where: str) -> ValueError:
    _, label = likely_keys(record)
    remedy = "set label_key to a field that every row has"
    if label:
        remedy = f"for this file set data.label_key={label}"
    return ValueError(
        f"{where}: the column {key!r} is null or absent; there are {', '.join(map(repr, record))}; {remedy}, or remove "
        "the row"
    )


def _missing(key: str, label_key: str | None, record: Mapping[str, Any], where: str) -> ValueError:
    prompt, label = likely_keys(record)
    remedy = "set data.prompt_key to the column with the prompt"
    if prompt:
        remedy = f"for this file set data.prompt_key={prompt}"
        if label and (label_key is None or label_key not in record):
            remedy += f" data.label_key={label}"
    return ValueError(
        f"{where}: the column {key!r} is null or absent; there are {', '.join(map(repr, record))}; {remedy} "
        "(prompt_key and label_key name columns that every row has), or remove the row"
    )


def _other_columns(record: Mapping[str, Any], prompt_key: str, label_key: str | None, prompt: Any) -> dict[str, Any]:
    """Return the columns for rewards and agents, under their names. A prompt of messages is `prompt`, as in TRL."""
    read = {prompt_key, "datasource"}
    # Reward functions get a column `label` as their argument anyway.
    if label_key == "label":
        read.add("label")
    others = {name: value for name, value in record.items() if name not in read}
    return others if isinstance(prompt, str) else {"prompt": prompt} | others
