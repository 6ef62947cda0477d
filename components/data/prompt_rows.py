"""Rows of prompts: the columns that the policy reads, and the treatment of all others.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from components.data.columns import (
    CONVERSATIONS,
    filled,
    read_prompt,
    read_system,
    read_tools,
    refuse_unread,
    refuse_without_a_place,
    texts_of,
)
from components.data.messages import TOOLS, are_messages, check_prompt


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
