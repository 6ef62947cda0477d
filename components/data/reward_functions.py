"""Reward functions as people have them already: each is called by the names of its parameters.

    reward_func(queries, prompts, labels, responses, **columns)                     OpenRLHF's signature, and ours
    accuracy(prompts, completions, completion_ids, trainer_state, **columns)        TRL's
    compute_score(data_source, solution_str, ground_truth, extra_info)              verl's, for one response
    compute_score(data_sources, solution_strs, ground_truths, extra_infos)          verl's, for all of them

Any column of the data may be a parameter. B responses. Nothing here imports torch; it runs where the function does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from components.data.rewards import Columns, read_columns
from components.data.score_functions import awaited, read_scores
from components.data.text import are_messages

RewardFunction = Callable[..., Any]

OF_ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
"""verl's parameters; a function that takes one of the first three is called for each response alone."""
OURS = ("queries", "prompts", "labels", "responses")
"""OpenRLHF's parameters and one more; the first three are given by their places where they are called otherwise."""
TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def by_names(function: RewardFunction) -> Callable[..., Columns]:
    """Make a function of the columns queries, prompts, labels, responses and rows.

    `rows` says of each response what else is known: `data_source`, `columns` (a mapping, the data's other columns),
    `completion_ids` and `step`. Prompts are text, but for a function that takes `completions` and data whose prompts
    are chat messages: it is given messages for both, as by TRL.

    The function may be async, and returns for each response a number, None (there is no reward) or a dict with `score`,
    in any kind of list; or a dict with `rewards` (see `read_columns`).
    """
    parameters = list(inspect.signature(function).parameters.values())
    names = {parameter.name for parameter in parameters}
    if names.intersection(OF_ONE[:3]):

        def call_each(*columns: Sequence[Any]) -> Columns:
            rows = [_of_one(*row) for row in zip(*columns)]
            return read_scores([awaited(function(**_chosen(parameters, row, OF_ONE))) for row in rows])

        return call_each
    is_trl = bool(names.intersection(TRL)) and names.isdisjoint({*OURS} - {*TRL})

    def call(queries: Sequence[str], *columns: Sequence[Any]) -> Columns:
        logs, texts = dict[str, Any](), dict[str, list[str | None]]()
        known = _of_all(queries, *columns) | {
            "log_metric": logs.__setitem__,
            "log_extra": lambda name, values: texts.__setitem__(str(name), [str(value) for value in values]),
        }
        if is_trl:
            _as_messages(known)
        found = read_rewards(awaited(_called(function, parameters, known, TRL if is_trl else OURS)), len(queries))
        logged = read_columns({"rewards": found.rewards, "extra_logs": logs}, len(queries)).logs
        return Columns(found.rewards, found.scores, found.logs | logged, found.texts | texts, found.absent)

    return call


def read_rewards(found: Any, count: int) -> Columns:
    """Read what a function returned for `count` responses; ValueError says what is wrong."""
    if isinstance(found, Mapping) or not hasattr(found, "__len__") or isinstance(found, str):
        return read_columns(found, count)
    values = found.tolist() if hasattr(found, "tolist") else list(found)
    if any(isinstance(value, Mapping) for value in values):
        if len(values) != count:
            raise ValueError(f"returned {len(values)} dicts for {count} responses; return one for each")
        return read_scores(values)
    absent = [place for place, value in enumerate(values) if value is None]
    columns = read_columns({"rewards": [0.0 if value is None else value for value in values]}, count)
    return Columns(columns.rewards, columns.scores, {}, {}, absent)


def _of_one(query: str, prompt: str, label: Any, response: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """What a function for one response may take."""
    columns = row.get("columns", {})
    extra = columns.get("extra_info", columns)
    known = dict(zip(OF_ONE, (row.get("data_source", ""), response, label, extra)))
    return columns | known | {"query": query, "prompt": prompt}


def _of_all(
    queries: Sequence[str],
    prompts: Sequence[str],
    labels: Sequence[Any],
    responses: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """What a function for all responses may take; the data's columns come first."""
    others = [row.get("columns", {}) for row in rows]
    sources = [row.get("data_source", "") for row in rows]
    known: dict[str, Any] = {name: [of.get(name) for of in others] for of in others for name in of}
    known |= dict(zip(OURS, (queries, prompts, labels, responses)))
    known |= {"completions": responses, "completion_ids": [row.get("completion_ids", []) for row in rows]}
    known["trainer_state"] = SimpleNamespace(global_step=rows[0].get("step", 0) if rows else 0)
    of_all = dict(zip((f"{name}s" for name in OF_ONE), (sources, responses, labels, others)))
    return known | of_all


def _as_messages(known: dict[str, Any]) -> None:
    """TRL's functions read chat messages where the data's prompts are such."""
    prompts = known.get("prompt", [])
    if prompts and all(map(are_messages, prompts)):
        known["prompts"] = prompts
        known["completions"] = [[{"role": "assistant", "content": text}] for text in known["completions"]]


def _called(
    function: RewardFunction, parameters: Sequence[inspect.Parameter], known: dict[str, Any], others: Sequence[str]
) -> Any:
    """Call a function for all responses: by names, or with the first three by their places if they have other names."""
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = [p.name for p in places if p.default is p.empty][:3]
    renamed = len(first) == 3 and others is OURS and not {*first} <= known.keys()
    if not renamed and (places or not any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        return function(**_chosen(parameters, known, others))
    left = [p for p in parameters if p.name not in first]
    return function(*(known[name] for name in OURS[:3]), **_chosen(left, known, OURS[3:]))


def _chosen(parameters: Sequence[inspect.Parameter], known: Mapping[str, Any], others: Sequence[str]) -> dict[str, Any]:
    """The arguments of a function by name; with `**` it is given `others` too, and the columns of the data.

    Raises:
        TypeError: it takes something that is not known.
    """
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    lacking = [p.name for p in named if p.default is p.empty and p.name not in known]
    if lacking:
        raise TypeError(
            f"it takes {', '.join(map(repr, lacking))}, and there is no such column in the data; there are "
            f"{', '.join(sorted(known))}"
        )
    names = [p.name for p in named if p.name in known]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        of_all = {*OURS, *TRL, *(f"{name}s" for name in OF_ONE)}
        names += [name for name in known if name in others or name not in of_all]
    return {name: known[name] for name in names}
