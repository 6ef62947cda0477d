"""Rows of prompts in verl's format: how they are read, and how files of them are written.

{"data_source", "prompt": text or messages, "ability", "reward_model": {"style", "ground_truth"}, "extra_info"}
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from components.data.cells import cell_at, label_of, text_or_messages
from components.data.mixture import Note, first_rows
from components.data.prompts import load_rows
from components.data.records import read_records
from components.data.scorers import REASONING_GYM_PREFIX, TASK_PREFIX

HELDOUT_ROWS = 2_048
"""Held-out prompts drawn from a task when the caller names no number."""
TRUTH_KEY = "reward_model.ground_truth"
"""Where a row has its label."""
SINGLE_TURN = "single_turn_agent"
"""verl's name of the agent that answers in one turn."""
OTHER_INPUTS = ("images", "videos", "audios")


def load_verl_rows(
    files: Sequence[str],
    *,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    needs_truth: bool = True,
    single_turn: bool = False,
    heldout: bool = False,
    max_rows: int | None = None,
    draw: bool = False,
    seed: int = 0,
    note: Note | None = None,
) -> list[dict[str, Any]]:
    """Read rows as `load_rows` gives them, with `extra_info` where a row has it.

    Args:
        files: each is what `read_records` takes, `task:<name>` or `reasoning_gym:<task>`, whose data source is that.
        prompt_key: the field with the prompt.
        source_key: the field that tells where a row is from.
        needs_truth: a row without a ground truth is an error; else its label is "".
        single_turn: a row for an agent, or with tools, is an error.
        heldout: the rows are for evaluation: of a task those that are kept for it.
        max_rows: so many at most.
        draw: which of them is drawn by `seed`; else they are the first.
        seed: see `draw`; also draws a task's rows.
        note: is called with a sentence if `max_rows` leaves rows out.
    """
    rows: list[dict[str, Any]] = []
    for name in files:
        if name.startswith((TASK_PREFIX, REASONING_GYM_PREFIX)):
            found = load_rows(
                name, heldout=heldout, max_rows=max_rows or (HELDOUT_ROWS if heldout else None), seed=seed
            )
            if name.startswith(REASONING_GYM_PREFIX):
                found = [{**row, "datasource": f"{REASONING_GYM_PREFIX}{row['datasource']}"} for row in found]
            rows += found
            continue
        for number, record in enumerate(read_records(name, label_key=TRUTH_KEY)):
            where = f"{name}, row {number}"
            if single_turn:
                _check_single_turn(record, where)
            rows.append(_row_of(record, where, prompt_key, source_key, needs_truth))
    first = first_rows(rows, max_rows, ", ".join(files), note)
    return random.Random(seed).sample(rows, len(first)) if draw and len(first) < len(rows) else first


def _row_of(
    record: Mapping[str, Any], where: str, prompt_key: str, source_key: str, needs_truth: bool
) -> dict[str, Any]:
    def lacks(column: str, mend: str) -> ValueError:
        columns = ", ".join(map(repr, record))
        return ValueError(f"{where}: the column {column} is null or absent; there are {columns}; {mend}")

    for option, key in (("prompt_key", prompt_key), ("reward_fn_key", source_key)):
        if record.get(key) is None:
            raise lacks(repr(key), f"set {option} to one that every row has, or take the row out")
    prompt = text_or_messages(
        record[prompt_key], f"{where}, column {prompt_key!r}", "set prompt_key to another column, or mend the row"
    )
    if others := [name for name in OTHER_INPUTS if record.get(name)]:
        raise ValueError(f"{where} has {', '.join(others)}, which the policy would not see; only text is supported")
    truth = cell_at(record, TRUTH_KEY)
    if needs_truth and truth is None:
        raise lacks(TRUTH_KEY, "the reward function needs it in every row")
    label = "" if truth is None else label_of(truth, f"{where}, column {TRUTH_KEY}", "the data")
    row = {"input": prompt, "label": label, "datasource": str(record[source_key])}
    return {**row, "extra_info": record["extra_info"]} if "extra_info" in record else row


def _check_single_turn(record: Mapping[str, Any], where: str) -> None:
    extra, agent = record.get("extra_info"), record.get("agent_name")
    tools = isinstance(extra, Mapping) and extra.get("need_tools_kwargs")
    if tools or agent not in (None, "", SINGLE_TURN):
        asked = "extra_info.need_tools_kwargs" if tools else f"agent_name {agent!r}"
        raise ValueError(
            f"{where} has {asked}, for episodes with tools, and would get one response; set agent.func_path to "
            "what plays them, or take the field out"
        )
