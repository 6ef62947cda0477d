"""Trial of the rewards before a run starts: one call of each function and server with rows of the data.

The call runs in a separate process, as in training, with at least two rows and responses of two lengths. It detects a
function that does not fit the data, that returns one value for several responses, or that cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from components.data.messages import are_messages
from components.data.row_kinds import SEARCHED_ROWS, rows_by_kind
from components.rewards.base import RewardSettings, RewardSource, is_reward_file, reward_parts
from components.rewards.errors import RefusedError, RewardError
from components.rewards.names import metric_names
from components.rewards.part_names import part_names
from components.rewards.servers import is_server, reward_urls

if TYPE_CHECKING:
    from components.rewards.base import RewardOutput
    from components.rewards.code import RewardCode

Rows = Sequence[Mapping[str, Any]]

SERVER_TRIES = 2
"""Maximum number of tries per server during the trial."""


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
        spec: the reward, in the format of `open_reward`.
        option: name of the option that sets it, for messages.
        rows: rows of each part of the data, by its name in messages. Parts without rows are skipped.
        settings: reward settings of the run.
        calls_servers: False for a plan, which may be made on a machine that cannot reach the servers.

    Returns:
        Notes for the user: values that the functions return, parts that were not tried, and metrics of a sum.

    Raises:
        ValueError: a function or server fails, or returns an invalid reward.
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
    """Call a reward function in a separate process, with the labels of rows as responses. See `try_rewards`.

    Args:
        code: function of a file, or reward code.
        option: name and value of the option that sets it, for messages.
        rows: rows of each part of the data, as in `try_rewards`.
        settings: reward settings of the run.
    """
    from components.rewards.workers import WorkerReward

    # A failed row must not end the trial with the message of a run: the one below names the option and the row.
    usual = replace(settings or RewardSettings(), workers=1, max_failed_share=1.0)
    notes = list[str]()
    with WorkerReward(code, usual, in_sum=True, in_one_call=True) as function:
        for where, part in rows.items():
            if not part:
                continue
            chosen = _trial_rows(part)
            output = None
            problem = ""
            try:
                output = _call(function, chosen)
            except RewardError as error:
                problem = str(error)
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
    """Raise a ValueError if some prompts are text and others are chat messages: a function reads one kind only."""
    first: dict[bool, int] = {}
    for number, row in enumerate(rows):
        first.setdefault(are_messages(row["input"]), number)
        if len(first) > 1:
            raise ValueError(
                f"{where}: the prompt of row {first[False]} is text, and that of row {first[True]} is a list of chat "
                "messages; a reward function reads one or the other, so write all of them as messages, or all as text"
            )


def _described(option: str, where: str, output: RewardOutput) -> list[str]:
    earned = f"{float(output.reward_B[0]):g}"
    if 0 in output.absent:
        earned = "no reward"
    notes = [f"{option} gives {earned} to the first row of {where}, its label as the response"]
    renamed = {name: metric for name, metric in metric_names(output.logs, warns=False).items() if name != metric}
    notes += [
        f"{option} logs {name!r}, which the run logs itself: it is renamed {metric}" for name, metric in renamed.items()
    ]
    return notes


def _try_servers(
    part: str, option: str, rows: Mapping[str, Rows], settings: RewardSettings, calls_servers: bool
) -> list[str]:
    """Send two rows to each server. Return a note for each server that fails.

    Raises:
        ValueError: all servers fail, or one rejects the request.
    """
    if not calls_servers:
        return [f"{option}={part} is not called for a plan; a run calls each server once before it starts"]
    from components.rewards.opening import open_reward

    urls = reward_urls(part)
    # With all the tries of a run, a server that is down would delay the start by minutes.
    once = replace(settings, url_tries=min(SERVER_TRIES, settings.url_tries))
    problems = list[str]()
    for url in urls:
        with open_reward(url, once) as server:
            try:
                for where_rows in filter(None, rows.values()):
                    _call(server, _trial_rows(where_rows))
            except RefusedError as error:  # a configuration error, which other servers cannot compensate
                raise ValueError(f"{option}: called before the start with rows of the data: {error}") from error
            except RewardError as error:
                problems.append(str(error))
    if len(problems) == len(urls):
        raise ValueError(f"{option}: called before the start with rows of the data: {problems[0]}")
    return [f"{option}: a run uses the other servers, as {problem}" for problem in problems]


def _trial_rows(rows: Rows) -> Rows:
    """Return the first row of each kind, and at least two rows."""
    chosen = [rows[numbers[0]] for numbers in rows_by_kind(rows)]
    if len(chosen) == 1:
        # A second row with a label of another length, so that the two responses can be told apart by their length.
        length = len(str(chosen[0]["label"]))
        others = (row for row in rows[1:SEARCHED_ROWS] if len(str(row["label"])) != length)
        chosen.append(next(others, rows[-1]))
    return chosen


def _call(source: RewardSource, rows: Rows) -> RewardOutput:
    """Reward the label of each row as its response. If all have the same length, a space is appended to the last."""
    prompts = [str(row["input"]) for row in rows]
    responses = [str(row["label"]) for row in rows]
    # A function that returns one value for all responses, such as a mean length, is noticed only if they differ.
    if len({len(response) for response in responses}) == 1:
        responses[-1] += " "
    others = [
        {"data_source": row["datasource"], "columns": row.get("extra_info") or {}, "completion_ids": [0] * (place + 1)}
        for place, row in enumerate(rows)
    ]
    queries = [prompt + response for prompt, response in zip(prompts, responses)]
    return source(queries, prompts, [row["label"] for row in rows], responses=responses, rows=others)
