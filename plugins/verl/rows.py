"""Rows of prompts in verl's format, read from files or from data sources of plug-ins.

{"data_source", "prompt": text or messages, "ability", "reward_model": {"style", "ground_truth"}, "extra_info"}
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.data.cells import cell_at, label_of
from components.data.columns import filled, likely_keys
from components.data.mixture import Note, first_rows
from components.data.prompt_rows import prompt_columns
from components.data.prompts import load_rows
from components.data.records import read_records
from components.data.sources import data_source
from components.data.values import check_one_kind

HELDOUT_ROWS = 2_048
"""Held-out prompts drawn from a task when the caller names no number."""
SOURCE_KEY = "data_source"
UNKNOWN_SOURCE = "unknown"
"""Data source of a row without that field, as in verl's reward managers."""
SOURCES = ("data_source", "datasource", "source", "dataset")
"""Columns that may contain the data source of a row."""
TRUTH_KEY = "reward_model.ground_truth"
"""Field with the label of a row."""
SINGLE_TURN = "single_turn_agent"
"""verl's name of the agent that answers in one turn."""


@dataclass(frozen=True, kw_only=True)
class RowForm:
    """Format of the rows of a run."""

    prompt_key: str = "prompt"
    """Field with the prompt."""
    source_key: str = SOURCE_KEY
    """Field with the data source of a row. Rows may lack the default field."""
    needs_truth: bool = True
    """A row without a ground truth is an error. Otherwise its label is ""."""
    agents: Collection[str] | None = None
    """Names of agents that can run a row. A row for another agent is an error, and so is a row with tools if
    SINGLE_TURN is among the names. None allows all."""
    ignored: Collection[str] = ()
    """Columns with a well-known meaning that are ignored on purpose."""
    kept: Collection[str] = ()
    """Columns that are copied into `extra_info`, for agents that read them there."""


def load_verl_rows(
    files: Sequence[str],
    *,
    heldout: bool = False,
    max_rows: int | None = None,
    draw: bool = False,
    seed: int = 0,
    note: Note | None = None,
    **form: Any,
) -> list[dict[str, Any]]:
    """Return rows in the format of `load_rows`, with the `extra_info` of rows that have it.

    Args:
        files: sources of `read_records`, or `<scheme>:<name>` of a plug-in that generates rows.
        heldout: the rows are for evaluation. A task then gives its held-out rows.
        max_rows: maximum number of rows.
        draw: choose the rows randomly by `seed` if there are more. Otherwise the first ones are used.
        seed: seed of `draw`, and of the rows that a task generates.
        note: called with a message if `max_rows` leaves rows out.
        form: fields of a `RowForm`.
    """
    rows: list[dict[str, Any]] = []
    for name in files:
        if (drawn := data_source(name)) is not None:
            count = max_rows
            if heldout:
                # A generated task has no end, so an evaluation needs a limit.
                count = max_rows or HELDOUT_ROWS
            task_rows = load_rows(name, heldout=heldout, max_rows=count, seed=seed)
            # A scorer of a whole scheme is registered under the scheme's name in `default_functions`, hence the prefix.
            if drawn.scorer == name.partition(":")[0]:
                task_rows = [{**row, "datasource": f"{drawn.scorer}:{row['datasource']}"} for row in task_rows]
            rows += task_rows
            continue
        rows += rows_of_records(read_records(name, label_key=TRUTH_KEY), name, RowForm(**form))
    return limited_rows(rows, max_rows, ", ".join(files), draw=draw, seed=seed, note=note)


def rows_of_records(records: Sequence[Mapping[str, Any]], name: str, form: RowForm) -> list[dict[str, Any]]:
    """Return the rows of records in verl's format; `name` is their source in messages."""
    rows = list[dict[str, Any]]()
    # Files without the default column of the data source are allowed: the user's function scores them.
    needs_source = form.source_key != SOURCE_KEY or any(SOURCE_KEY in record for record in records)
    for number, record in enumerate(records):
        where = f"{name}, row {number}"
        if form.agents is not None:
            _check_agent(record, where, form.agents)
        rows.append(_row_of(record, where, form, needs_source))
    check_one_kind((row["input"] for row in rows), name)
    return rows


def limited_rows(
    rows: list[dict[str, Any]], most: int | None, source: str, *, draw: bool, seed: int, note: Note | None
) -> list[dict[str, Any]]:
    """Return at most `most` rows: the first ones, or with `draw` a random sample by `seed`."""
    first = first_rows(rows, most, source, note)
    if draw and len(first) < len(rows):
        return random.Random(seed).sample(rows, len(first))
    return first


def _row_of(record: Mapping[str, Any], where: str, form: RowForm, needs_source: bool) -> dict[str, Any]:
    prompt_key = form.prompt_key
    source_key = form.source_key
    required_keys = [prompt_key]
    if needs_source:
        required_keys.append(source_key)
    for key in required_keys:
        if record.get(key) is None:
            raise _missing(record, where, repr(key), prompt_key, source_key)
    read = prompt_columns(record, prompt_key, where, form.ignored, option="prompt_key")
    truth = cell_at(record, TRUTH_KEY)
    if form.needs_truth and truth is None:
        raise _missing(record, where, TRUTH_KEY, prompt_key, source_key)
    label = ""
    if truth is not None:
        label = label_of(truth, f"{where}, column {TRUTH_KEY}", "the data")
    row = {"input": read["input"], "label": label, "datasource": str(record.get(source_key, UNKNOWN_SOURCE))} | read
    kept = {name: record[name] for name in form.kept if record.get(name) is not None}
    if kept:
        row["extra_info"] = {**(record.get("extra_info") or {}), **kept}
    elif "extra_info" in record:
        # Not a copy: the reward function gets the value of the file, even if it is None.
        row["extra_info"] = record["extra_info"]
    return row


def _missing(record: Mapping[str, Any], where: str, field: str, prompt_key: str, source_key: str) -> ValueError:
    """Return the error for a row without a required field, with advice on options and on a recipe for such files."""
    prompt, label = likely_keys(record)
    remedies: list[str] = []
    if record.get(prompt_key) is None and prompt:
        remedies.append(f"set data.prompt_key={prompt}")
    elif record.get(prompt_key) is None:
        remedies.append("set prompt_key to the column with the prompt")
    if record.get(source_key) is None:
        source = next(iter(filled(record, SOURCES)), None)
        if source:
            remedies.append(f"set data.reward_fn_key={source}")
        else:
            remedies.append(f"add a column {source_key!r}, its source")
    if "ground_truth" not in (record.get("reward_model") or {}):
        truth = "what the reward compares with"
        if label:
            truth = f"the value of {label!r}"
        remedies.append(f"add a column 'reward_model': {{'ground_truth': {truth}}}")
    # Files of questions and answers are usually meant for recipes/grpo, which reads them without any conversion.
    other = ""
    if prompt:
        other = f"; or train on the file as it is by recipes/grpo, with data.prompt_key={prompt}"
        if label:
            other += f" data.label_key={label}"
    return ValueError(
        f"{where}: there is no field {field}, only {', '.join(map(repr, record))}; for this file "
        f"{', '.join(remedies)}{other} (prompt_key and reward_fn_key name columns)"
    )


def _check_agent(record: Mapping[str, Any], where: str, agents: Collection[str]) -> None:
    extra = record.get("extra_info")
    agent = record.get("agent_name")
    tools = SINGLE_TURN in agents and isinstance(extra, Mapping) and extra.get("need_tools_kwargs")
    if tools or agent not in (None, "", *agents):
        field = f"agent_name {agent!r}"
        if tools:
            field = "extra_info.need_tools_kwargs"
        raise ValueError(
            f"{where} has {field}, and its episodes would be run by {', '.join(agents)}; set "
            "actor_rollout_ref.rollout.multi_turn.tool_config_path to a file of tools, or agent.func_path to an agent "
            "file, or take the field out"
        )
