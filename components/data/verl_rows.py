"""Rows of prompts in verl's format: how they are read, and how files of them are written.

{"data_source", "prompt": text or messages, "ability", "reward_model": {"style", "ground_truth"}, "extra_info"}
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from components.data.prompts import check_prompt, load_rows
from components.data.records import read_records
from components.data.scorers import REASONING_GYM_PREFIX, TASK_PREFIX

HELDOUT_ROWS = 2_048
"""Held-out prompts drawn from a task when the caller names no number."""
SOURCE_KEY = "data_source"
UNKNOWN_SOURCE = "unknown"
"""Data source of a row without that field, as in verl's reward managers."""
SINGLE_TURN = "single_turn_agent"
"""verl's name of the agent that answers in one turn."""
OTHER_INPUTS = ("images", "videos", "audios")


def load_verl_rows(
    files: Sequence[str],
    *,
    prompt_key: str = "prompt",
    source_key: str = SOURCE_KEY,
    needs_truth: bool = True,
    single_turn: bool = False,
    heldout: bool = False,
    max_rows: int | None = None,
    draw: bool = False,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Read rows as `load_rows` gives them, with `extra_info` where a row has it.

    Args:
        files: each is what `read_records` takes, `task:<name>` or `reasoning_gym:<task>`, whose data source is that.
        prompt_key: the field with the prompt.
        source_key: the field that tells where a row is from; a row may lack the default one.
        needs_truth: a row without a ground truth is an error; else its label is "".
        single_turn: a row for an agent, or with tools, is an error.
        heldout: the rows are for evaluation: of a task those that are kept for it.
        max_rows: so many at most.
        draw: which of them is drawn by `seed`; else they are the first.
        seed: see `draw`; also draws a task's rows.
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
        for number, record in enumerate(read_records(name)):
            where = f"{name}, row {number}"
            if single_turn:
                _check_single_turn(record, where)
            rows.append(_row_of(record, where, prompt_key, source_key, needs_truth))
    if max_rows is None or len(rows) <= max_rows:
        return rows
    return random.Random(seed).sample(rows, max_rows) if draw else rows[:max_rows]


def _row_of(
    record: Mapping[str, Any], where: str, prompt_key: str, source_key: str, needs_truth: bool
) -> dict[str, Any]:
    found, reward = f"{where}: there is no field {{}}, only {', '.join(map(repr, record))}", record.get("reward_model")
    for option, key in (("prompt_key", prompt_key), ("reward_fn_key", source_key)):
        if record.get(key) is None and (key in record or key != SOURCE_KEY):
            raise ValueError(f"{found.format(repr(key))}; set {option} to one that every row has")
    check_prompt(record[prompt_key], f"{where}, field {prompt_key!r}", "prompt_key")
    if others := [name for name in OTHER_INPUTS if record.get(name)]:
        raise ValueError(f"{where} has {', '.join(others)}, which the policy would not see; only text is supported")
    if needs_truth and not (isinstance(reward, Mapping) and reward.get("ground_truth") is not None):
        raise ValueError(f"{found.format('reward_model.ground_truth')}, and the reward function asks for it")
    truth = reward.get("ground_truth") if isinstance(reward, Mapping) else None
    label = "" if truth is None else truth
    row = {"input": record[prompt_key], "label": label, "datasource": str(record.get(source_key, UNKNOWN_SOURCE))}
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
