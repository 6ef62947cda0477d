"""Rows of prompts: the columns that the policy reads, and the treatment of all others.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from components.data.cells import cell_at, check_one_kind, kind_of, label_of
from components.data.columns import (
    CONVERSATIONS,
    TOOLS,
    column_note,
    filled,
    is_blank,
    likely_keys,
    read_prompt,
    read_system,
    read_tools,
    refuse_unread,
    refuse_without_a_place,
    texts_of,
)
from components.data.messages import are_messages

DEFAULT_INPUT = "input"
"""Column of the prompt if the caller names none."""
DEFAULT_DATASOURCE = "default"
"""Data source of rows without a column `datasource`."""


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


def prompt_columns(
    record: Mapping[str, Any],
    key: str,
    where: str,
    ignored: Collection[str] = (),
    *,
    is_default: bool = False,
    option: str = "prompt_key",
) -> dict[str, Any]:
    """Return the part of a row that the policy reads: `input`, and `system`, `tools` and `columns` if it has them.

    `columns` lists the columns that were read, if they are more than `key`.

    Args:
        record: the row.
        key: column with the prompt.
        where: file and row, for error messages.
        ignored: columns that the policy must not read.
        is_default: True if the user did not choose `key`. Another column with a prompt is then an error.
        option: option that sets `key`, for error messages.

    Raises:
        ValueError: the column holds no prompt, or the policy would not read a column with a well-known meaning.
    """
    try:
        prompt = read_prompt(record, key, ignored)
    except ValueError as error:
        remedy = f"correct the row, or set {option} to another column"
        raise ValueError(f"{where}, column {key!r}, {error}; {remedy}") from error
    try:
        # A file may have the default column by chance, next to the one that really holds the prompt.
        if is_default and (isinstance(prompt.value, str) or are_messages(prompt.value)):
            others = [name for name in ("prompt", "instruction", *CONVERSATIONS) if name not in prompt.columns]
            remedy = f"set data.{option}={next(iter(filled(record, others)), key)}"
            refuse_unread(record, others, texts_of(prompt.value), ignored, remedy)
        check_prompt(prompt.value, f"field {key!r}", option)
        refuse_without_a_place(record, ignored)
        system, names = read_system(record, ignored)
        tools = read_tools(record, ignored)
    except ValueError as error:
        raise ValueError(f"{where}, {error}") from error
    policy_columns: dict[str, Any] = {"input": prompt.value}
    columns = [*prompt.columns, *names]
    if system is not None:
        policy_columns |= {"system": system, "system_column": names[0]}
    if tools:
        policy_columns[TOOLS] = tools
        columns.append(TOOLS)
    # Left out in the common case, because a data set may have millions of rows.
    if columns != [key]:
        policy_columns["columns"] = columns
    return policy_columns


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


def check_prompt(prompt: Any, where: str, key: str = "prompt_key") -> None:
    """Check that a prompt is text or a list of messages, and not empty. `key` is the option that names its column.

    Raises:
        ValueError: the prompt is something else, or is empty.
    """
    if isinstance(prompt, str) and not is_blank(prompt):
        return
    if isinstance(prompt, str):
        raise ValueError(f"{where}: the prompt {prompt!r:.20} is empty; remove the row, or set {key} to another field")
    if not prompt or not are_messages(prompt):
        raise ValueError(
            f"{where}: expected a string or a list of {{role, content}} messages, found {kind_of(prompt)}; "
            f"set {key} to the field with the prompt"
        )
    if all(message["role"] == "system" or _is_empty(message) for message in prompt):
        raise ValueError(f"{where}: all messages but the system's are empty; add a user's message")


def _is_empty(message: Mapping[str, Any]) -> bool:
    return is_blank(message["content"]) and not message.get("tool_calls")


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
