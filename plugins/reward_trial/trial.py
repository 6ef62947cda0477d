"""Trial of the rewards before a run starts: one real call of each function and server, with rows of the data.

The call is made in a process of its own, as in training, and has at least two rows and two lengths of responses. A
function that does not fit the data, returns one value for many responses, or cannot be loaded is found here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from components.data.messages import are_messages
from components.data.row_kinds import SEARCHED_ROWS, rows_by_kind
from components.rewards.base import RewardSettings, RewardSource, is_reward_file, reward_parts
from components.rewards.errors import RefusedError, RewardError
from components.rewards.names import metric_names, part_names
from components.rewards.servers import is_server, reward_urls

if TYPE_CHECKING:
    from components.rewards.base import RewardOutput
    from components.rewards.functions import RewardCode

Rows = Sequence[Mapping[str, Any]]

SERVER_TRIES = 2


def try_rewards(
    spec: str,
    option: str,
    rows: Mapping[str, Rows],
    settings: RewardSettings | None = None,
    *,
    calls_servers: bool = True,
) -> list[str]:
    """Call each function and each server of a reward once for each part of the data.

    Args:
        spec: the reward, as `open_reward` takes it.
        option: its option, for messages.
        rows: of the data, by what messages call them; parts without rows are left out.
        settings: of the run.
        calls_servers: False for a plan, which may be made where the servers cannot be reached.

    Returns:
        Notes for the user: what the functions return, what was not tried, and how a sum is logged.

    Raises:
        ValueError: a function or server fails, or returns what is no reward; the message says what and where.
    """
    parts = reward_parts(spec)
    notes = list[str]()
    for part in dict.fromkeys(part for _, part in parts):
        if is_server(part):
            notes += _try_servers(part, option, rows, settings or RewardSettings(), calls_servers)
        elif is_reward_file(part):
            for where, part_rows in rows.items():
                _refuse_mixed(part_rows, f"{option}={part}: {where}")
            notes += try_code(part, f"{option}={part}", rows, settings)
    if parts != [(1.0, spec)]:
        names = part_names([part for _, part in parts])
        terms = " + ".join(f"{weight:g} * reward/{name}" for (weight, _), name in zip(parts, names))
        total = sum(weight for weight, _ in parts)
        notes.append(
            f"{option} is a sum: reward/reward = {terms}; reward/score is the same sum of the parts' scores, divided "
            f"by {total:g}, the sum of the weights"
        )
    return notes


def try_code(
    code: str | RewardCode, option: str, rows: Mapping[str, Rows], settings: RewardSettings | None = None
) -> list[str]:
    """Call a reward function in a process of its own, with rows whose labels are the responses; see `try_rewards`.

    Args:
        code: a file's function, or reward code.
        option: the option that names it, with its value, for messages.
        rows: as in `try_rewards`.
        settings: of the run.
    """
    from components.rewards.workers import WorkerReward

    usual = replace(settings or RewardSettings(), workers=1, max_failed_share=1.0)
    notes = list[str]()
    with WorkerReward(code, usual, in_sum=True, in_one_call=True) as function:
        for where, part in rows.items():
            if not part:
                continue
            chosen = _trial_rows(part)
            try:
                output, problem = _call(function, chosen), ""
            except RewardError as error:
                output, problem = None, str(error)
            if output is not None and output.failures:
                problem = f"{function.source} fails: {next(iter(output.failures.values()))}"
            if output is None or problem:
                raise ValueError(
                    f"{option}: called with the first row of {where} and {len(chosen) - 1} more, their labels as the "
                    f"responses: {problem}"
                )
            if not notes:
                notes = _described(option, where, output)
    return notes


def _refuse_mixed(rows: Rows, where: str) -> None:
    """Raise ValueError for prompts of which some are text and some chat messages: a function would get both kinds."""
    first: dict[bool, int] = {}
    for number, row in enumerate(rows):
        first.setdefault(are_messages(row["input"]), number)
        if len(first) > 1:
            raise ValueError(
                f"{where}: the prompt of row {first[False]} is text, and that of row {first[True]} is a list of chat "
                "messages; a reward function reads one or the other, so write all of them as messages, or all as text"
            )


def _described(option: str, where: str, output: RewardOutput) -> list[str]:
    earned = "no reward" if 0 in output.absent else f"{float(output.reward_B[0]):g}"
    notes = [f"{option} gives {earned} to the first row of {where}, its label as the response"]
    renamed = {name: metric for name, metric in metric_names(output.logs, warns=False).items() if name != metric}
    notes += [
        f"{option} logs {name!r}, which the run logs itself: it is renamed {metric}" for name, metric in renamed.items()
    ]
    return notes


def _try_servers(
    part: str, option: str, rows: Mapping[str, Rows], settings: RewardSettings, calls_servers: bool
) -> list[str]:
    """Send two rows to each server; ValueError if none of them can be used, and a note for each that cannot."""
    if not calls_servers:
        return [f"{option}={part} is not called for a plan; a run calls each server once before it starts"]
    from components.rewards.opening import open_reward

    urls = reward_urls(part)
    once = replace(settings, url_tries=min(SERVER_TRIES, settings.url_tries))
    problems = list[str]()
    for url in urls:
        with open_reward(url, once) as server:
            try:
                for where_rows in filter(None, rows.values()):
                    _call(server, _trial_rows(where_rows))
            except RefusedError as error:  # another server would be no excuse for a wrong one
                raise ValueError(f"{option}: called before the start with rows of the data: {error}") from error
            except RewardError as error:
                problems.append(str(error))
    if len(problems) == len(urls):
        raise ValueError(f"{option}: called before the start with rows of the data: {problems[0]}")
    return [f"{option}: a run uses the other servers, as {problem}" for problem in problems]


def _trial_rows(rows: Rows) -> Rows:
    """Return the first row of each kind, and at least two."""
    chosen = [rows[numbers[0]] for numbers in rows_by_kind(rows)]
    if len(chosen) == 1:
        length = len(str(chosen[0]["label"]))
        others = (row for row in rows[1:SEARCHED_ROWS] if len(str(row["label"])) != length)
        chosen.append(next(others, rows[-1]))
    return chosen


def _call(source: RewardSource, rows: Rows) -> RewardOutput:
    """Reward each row's label as the response, one of them with a space more where all have one length."""
    prompts = [str(row["input"]) for row in rows]
    responses = [str(row["label"]) for row in rows]
    if len({len(response) for response in responses}) == 1:
        responses[-1] += " "
    others = [
        {"data_source": row["datasource"], "columns": row.get("extra_info") or {}, "completion_ids": [0] * (place + 1)}
        for place, row in enumerate(rows)
    ]
    queries = [prompt + response for prompt, response in zip(prompts, responses)]
    return source(queries, prompts, [row["label"] for row in rows], responses=responses, rows=others)
