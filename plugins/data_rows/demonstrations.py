"""Demonstrations from the rows of a data set: conversations, pairs of prompt and response, or plain texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.data.chat import as_messages, with_system
from components.data.columns import (
    CONVERSATIONS,
    PREFERENCES,
    PROMPTS,
    RESPONSES,
    column_note,
    filled,
    likely_keys,
    read_prompt,
    read_system,
    read_tools,
    refuse_unread,
    refuse_weight,
    refuse_without_a_place,
    texts_of,
)
from components.data.conversations import read_messages
from components.data.messages import TOOLS, are_messages, is_blank, needs_template
from components.data.mixture import Note, first_rows
from components.data.records import read_records
from components.data.supervised import DemonstrationFormat
from components.data.values import check_one_kind

PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("problem", "solution"),
    ("input", "output"),
)
"""Pairs of columns (prompt, response) that are found without an option. An `instruction` is read together with its
`input` or `context`."""


def read_demonstrations(
    source: str | Path,
    form: DemonstrationFormat,
    split: str,
    max_rows: int | None,
    note: Note | None,
    info: Note | None,
) -> list[dict[str, Any]]:
    """Read the demonstrations of a source of `read_records`. See `load_demonstrations` for the arguments.

    Raises:
        ValueError: the source cannot be read, or a row has no demonstration. The message names the row.
    """
    reader = DemonstrationReader(form)
    rows: list[dict[str, Any]] = []
    used: dict[str, None] = {}
    records = first_rows(read_records(source, split=split), max_rows, str(source), note)
    for number, record in enumerate(records):
        try:
            row, columns = reader.read_columns(record)
        except ValueError as error:
            raise ValueError(f"{source}, row {number}: {error}") from error
        rows.append(row)
        used.update(dict.fromkeys(columns))
    for kind in ("prompt", "response"):
        check_one_kind((row.get(kind) for row in rows), f"{source}, its {kind}s")
    if info is not None:
        info(f"{source}: {column_note(used, records)}")
    return rows


@dataclass(frozen=True)
class DemonstrationReader:
    """Reader of the rows of one format."""

    form: DemonstrationFormat

    def read(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Read a row as `{"messages"}`, `{"prompt", "response"}` or `{"text"}`, with `tools` if it has any.

        Raises:
            ValueError: a column is missing or has a value of the wrong kind, or a column with a well-known meaning
                would not be read.
        """
        return self.read_columns(record)[0]

    def read_columns(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the row of `read`, and the names of the columns that were read."""
        ignored = self.form.ignored_columns
        refuse_weight(record, ignored)
        # Plain texts are read before the other checks: their rows may have any further columns.
        if self.form.plain_text:
            return self._read_text(record)
        refuse_without_a_place(record, ignored)
        prompt_key, response_key = self._keys(record)
        system, names = read_system(record, ignored)
        tools = read_tools(record, ignored)
        row: dict[str, Any]
        if response_key is None:
            messages = _conversation(record[prompt_key], prompt_key)
            row = {"messages": with_system(messages, system)}
            columns = [prompt_key]
        else:
            prompt = read_prompt(record, prompt_key, ignored)
            row = {"prompt": prompt.value, "response": record[response_key]}
            response = read_messages(record[response_key])
            if response is not None:
                row["response"] = response
            columns = [*prompt.columns, response_key]
            _check_pair(row, prompt_key)
            self._add_system(row, system, names, tools)
        columns += names
        self._refuse_unread(record, columns, row, response_key)
        if tools:
            row[TOOLS] = tools
            columns.append(TOOLS)
        return row, columns

    def _keys(self, record: Mapping[str, Any]) -> tuple[str, str | None]:
        """Return the column of the prompt or the conversation, and of the response (None without one)."""
        prompt_key = self.form.prompt_key
        response_key = self.form.response_key
        if prompt_key is None and response_key is None:
            if conversations := filled(record, CONVERSATIONS, self.form.ignored_columns):
                return conversations[0], None
            # Blank columns count too: `_check_pair` reports them with a better message than a missing column.
            pairs = [pair for pair in PAIRS if {*pair} <= {*record}.difference(self.form.ignored_columns)]
            if not pairs:
                raise ValueError(_missing(record))
            return pairs[0]
        if prompt_key is None:
            prompt_key = next(iter(filled(record, PROMPTS, {*self.form.ignored_columns, str(response_key)})), "prompt")
        for key in filter(None, (prompt_key, response_key)):
            if key not in record:
                raise ValueError(_missing(record, key))
        return prompt_key, response_key

    def _read_text(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        key = self.form.prompt_key or "text"
        if self.form.prompt_key is None and "text" not in record and "input" in record:
            key = "input"
        if key not in record:
            raise ValueError(_missing(record, key))
        if not isinstance(record[key], str):
            raise ValueError(f"plain text is expected, found {record[key]!r:.80}; set data.prompt_key")
        return {"text": record[key]}, [key]

    def _add_system(
        self, row: dict[str, Any], system: str | None, names: list[str], tools: list[dict[str, Any]]
    ) -> None:
        """Put the system prompt into the prompt of a row.

        Raises:
            ValueError: the row does not go through the chat template, so a system prompt or tools would not be written.
        """
        has_text = isinstance(row["prompt"], str) and isinstance(row["response"], str)
        if has_text and not self.form.apply_chat_template:
            if tools:
                raise needs_template(TOOLS, tools)
            if system is not None and system.strip() not in row["prompt"]:
                raise needs_template(names[0], system)
        elif system is not None:
            row["prompt"] = with_system(as_messages(row["prompt"]), system)

    def _refuse_unread(
        self, record: Mapping[str, Any], columns: list[str], row: Mapping[str, Any], response_key: str | None
    ) -> None:
        """Reject a row with content in a column of a well-known meaning that is neither read nor ignored."""
        names = ["context"]
        # With an option for a column, the user has decided against the other columns of that kind.
        if self.form.prompt_key is None:
            names += ["text", *CONVERSATIONS, *PROMPTS]
        if self.form.prompt_key is None and self.form.response_key is None:
            names += RESPONSES
            if response_key is not None:
                names += PREFERENCES
        others = [name for name in names if name not in columns]
        keys = f"data.prompt_key={columns[0]}"
        if response_key is not None:
            keys += f" data.response_key={response_key}"
        refuse_unread(record, others, texts_of(*row.values()), self.form.ignored_columns, f"choose columns, as {keys}")
        label = record.get("label")
        # A Boolean label is KTO's mark of good and bad responses; supervised training would learn the bad ones too.
        if isinstance(label, bool) and self.form.response_key is None and "label" not in self.form.ignored_columns:
            raise ValueError(
                f"column 'label' is {label}, which marks responses as wanted or not (KTO), and all would be learnt; "
                "keep only the wanted rows and set data.ignored_columns=label, or train on all with recipes/dpo and "
                "algorithm.loss=kto"
            )


def _conversation(value: Any, key: str) -> list[dict[str, Any]]:
    messages = read_messages(value)
    if messages is None:
        raise ValueError(
            f"{key!r} must be a list of {{role, content}}, found {value!r:.80}; set data.response_key if it is a "
            "prompt, or data.plain_text if all of it is learnt"
        )
    return messages


def _check_pair(row: Mapping[str, Any], prompt_key: str) -> None:
    prompt = row["prompt"]
    response = row["response"]
    if is_blank(prompt) or not (isinstance(prompt, str) or are_messages(prompt)):
        raise ValueError(
            f"column {prompt_key!r} must hold a prompt, found {prompt!r:.80}; set data.prompt_key to another column, "
            "or data.plain_text=true for texts without a prompt"
        )
    if not isinstance(response, str) and not (response and are_messages(response)):
        raise ValueError(f"'response' must be text, found {response!r:.80}; set data.response_key")


def _missing(record: Mapping[str, Any], key: str | None = None) -> str:
    """Return the error message for a row without a demonstration, or without the column `key`, with the remedy."""
    columns = sorted(map(str, record))
    known = ", ".join(f"{prompt!r} with {response!r}" for prompt, response in PAIRS)
    missing = f"the columns {columns} are no demonstration"
    if key:
        missing = f"there is no column {key!r}, only {columns}"
    prompt, _ = likely_keys(record)
    response = next((name for name in (*RESPONSES, "chosen", "target", "label") if name in record), None)
    if prompt and response:
        remedy = f"for this file set data.prompt_key={prompt} data.response_key={response}"
    elif not is_blank(record.get("text")):
        remedy = "for this file set data.plain_text=true, which learns all of 'text'"
    else:
        remedy = "set data.prompt_key and data.response_key"
    if "chosen" in record:
        remedy += " (rows of 'chosen' and 'rejected' are for the recipes dpo and reward_model)"
    return f"{missing}; {remedy}. Known without options are 'messages', 'conversations', and {known}"
