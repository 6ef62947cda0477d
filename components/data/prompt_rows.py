"""Rows of prompts: which columns the policy reads, and what becomes of the others. Nothing here needs torch."""

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
"""Column of the prompt where the caller names none."""
DEFAULT_DATASOURCE = "default"
"""Source of the rows of data that do not name one themselves."""


def read_rows(
    records: list[dict[str, Any]], source: str, prompt_key: str, label_key: str | None, ignored: Collection[str]
) -> list[dict[str, Any]]:
    """Read records as the rows of `load_rows`; `source` names them in messages."""
    rows = []
    for number, record in enumerate(records):
        where = f"{source}, row {number}"
        if record.get(prompt_key) is None:
            raise _missing(prompt_key, label_key, record, where)
        read = prompt_columns(record, prompt_key, where, ignored, is_default=prompt_key == DEFAULT_INPUT)
        datasource = record.get("datasource")
        row = {
            "input": read["input"],
            "label": "" if label_key is None else _label(record, label_key, where),
            "datasource": DEFAULT_DATASOURCE if datasource is None else str(datasource),
        }
        if others := _other_columns(record, prompt_key, label_key, read["input"]):
            row["extra_info"] = others
        rows.append(row | read)
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
    """Read what the policy reads of a row: `input`, and `system`, `tools` and `columns` where it is not `key` alone.

    Args:
        record: the row.
        key: the column with the prompt.
        where: the row, for messages.
        ignored: columns that the policy is not to read.
        is_default: nobody has chosen `key`, so that another column with a prompt is an error.
        option: names the column with the prompt.

    Raises:
        ValueError: the column holds no prompt, or the policy would not read a column of a well-known meaning.
    """
    try:
        prompt = read_prompt(record, key, ignored)
    except ValueError as error:
        mend = f"mend the row, or set {option} to another column"
        raise ValueError(f"{where}, column {key!r}, {error}; {mend}") from error
    try:
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
    found: dict[str, Any] = {"input": prompt.value}
    if system is not None:
        found |= {"system": system, "system_column": names[0]}
    if tools:
        found[TOOLS] = tools
    columns = [*prompt.columns, *names, *([TOOLS] if tools else [])]
    return found if columns == [key] else found | {"columns": columns}


def describe_columns(rows: Sequence[Mapping[str, Any]], used: Sequence[str]) -> str:
    """Describe in one line which columns of rows are used; `used` are those that options name."""
    others = (_own_columns(row) for row in rows)
    read = [name for row in rows for name in row.get("columns", ())]
    return column_note([*used, *read], others, "only for rewards and agents")


def _own_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns beside the prompt, which is there once more where it is messages."""
    copied = "" if isinstance(row["input"], str) else "prompt"
    return {name: value for name, value in (row.get("extra_info") or {}).items() if name != copied}


def check_prompt(prompt: Any, where: str, key: str = "prompt_key") -> None:
    """ValueError unless it is a text or a list of messages; `key` is the option that names its field."""
    if isinstance(prompt, str) and not is_blank(prompt):
        return
    if isinstance(prompt, str):
        raise ValueError(
            f"{where}: the prompt {prompt!r:.20} is empty; leave the row out, or set {key} to another field"
        )
    if not prompt or not are_messages(prompt):
        raise ValueError(
            f"{where}: expected a string or a list of {{role, content}} messages, found {kind_of(prompt)}; "
            f"set {key} to the field with the prompt"
        )
    if all(message["role"] == "system" or _says_nothing(message) for message in prompt):
        raise ValueError(
            f"{where}: no message but the system's holds anything, so there is nothing to respond to; add a user's "
            "message"
        )


def _says_nothing(message: Mapping[str, Any]) -> bool:
    return is_blank(message["content"]) and not message.get("tool_calls")


def _label(record: Mapping[str, Any], key: str, where: str) -> Any:
    """Return the label of a row: a column, or with dots a field of a column."""
    value = cell_at(record, key)
    if value is None:
        raise _missing_label(key, record, where)
    return label_of(value, f"{where}, column {key!r}", "label_key")


def _missing_label(key: str, record: Mapping[str, Any], where: str) -> ValueError:
    _, label = likely_keys(record)
    remedy = f"for this file set data.label_key={label}" if label else "set label_key to a field that every row has"
    return ValueError(
        f"{where}: the column {key!r} is null or absent; there are {', '.join(map(repr, record))}; {remedy}, or take "
        "the row out"
    )


def _missing(key: str, label_key: str | None, record: Mapping[str, Any], where: str) -> ValueError:
    prompt, label = likely_keys(record)
    keys = [f"data.prompt_key={prompt}"] if prompt else []
    keys += [f"data.label_key={label}"] if label and (label_key is None or label_key not in record) else []
    remedy = f"for this file set {' '.join(keys)}" if prompt else "set data.prompt_key to the column with the prompt"
    return ValueError(
        f"{where}: the column {key!r} is null or absent; there are {', '.join(map(repr, record))}; {remedy} "
        "(prompt_key and label_key name columns that every row has), or take the row out"
    )


def _other_columns(record: Mapping[str, Any], prompt_key: str, label_key: str | None, prompt: Any) -> dict[str, Any]:
    """Return what rewards and agents may read under its own name; a prompt of messages as `prompt`, as TRL has it."""
    read = {prompt_key, "datasource"} | ({"label"} if label_key == "label" else set())
    others = {name: value for name, value in record.items() if name not in read}
    return others if isinstance(prompt, str) else {"prompt": prompt} | others
