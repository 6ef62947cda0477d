"""Reward functions as people have them already: each is called by the names of its parameters.

    reward_func(queries, prompts, labels, responses, **columns)                     OpenRLHF's signature, and ours
    accuracy(prompts, completions, completion_ids, trainer_state, **columns)        TRL's
    compute_score(data_source, solution_str, ground_truth, extra_info)              verl's, for one response
    compute_score(data_sources, solution_strs, ground_truths, extra_infos)          verl's, for all of them

Any column of the data may be a parameter. B responses. Nothing here imports torch; it runs where the function does.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from components.data.cells import label_text
from components.data.child_process import load_file
from components.data.rewards import Columns, is_reward_file, read_columns, reward_function
from components.data.scorers import Scorer, get_scorer, module_of
from components.data.text import are_messages

RewardFunction = Callable[..., Any]

OF_ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
"""verl's parameters; a function that takes one of the first three is called for each response alone."""
OF_ALL = tuple(f"{name}s" for name in OF_ONE)
"""verl's parameters of a function for all responses."""
OURS = ("queries", "prompts", "labels", "responses")
"""OpenRLHF's parameters and one more; the first three are given by their places where they are called otherwise."""
TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


PREDICTION = "pred"
"""What a function says that it took for the answer: text, whatever it looks like."""


@dataclass(frozen=True, kw_only=True)
class RewardCode:
    """Code that rewards responses in processes of its own."""

    source: str
    """What errors call it."""
    load: Callable[[], Callable[..., Columns]]
    """Gives in such a process what `by_names` gives."""
    reads_rows: bool = True
    """Whether it reads more than queries, prompts, labels and responses."""
    of_one: bool = False
    """It takes one response at a time: chunks are as long as it is fast."""
    of_batch: bool = False
    """One call gets all responses of a batch, and the time of all of them."""


def code_of(spec: str, arguments: Mapping[str, Any] | None = None, of_one: bool | None = None) -> RewardCode:
    """The code of a scorer, or of a function of a user's file.

    Args:
        spec: the scorer's name, or `FILE.py` or `FILE.py:NAME`.
        arguments: further ones of a file's function.
        of_one: a file's function is called for each response alone (or, False, for all of a batch at once). Default:
            as its parameters are named.

    Raises:
        ValueError: there is no such scorer or function.
    """
    if is_reward_file(spec):
        path, name = reward_function(spec)
        load = partial(_load_function, path, name, arguments, of_one)
        return RewardCode(source=f"{name} in {str(path)!r}", load=load, of_one=of_one is True, of_batch=of_one is False)
    load = partial(_load_scorer, get_scorer(spec), module_of(spec))
    return RewardCode(source=f"scorer {spec!r}", load=load, reads_rows=False)


def scored(scorer: Scorer, solution_str: str, ground_truth: Any) -> float | dict[str, float]:
    """A scorer in verl's signature."""
    return scorer(solution_str, label_text(ground_truth))


# What follows runs in a child.


def _load_function(
    path: Path, name: str, arguments: Mapping[str, Any] | None, of_one: bool | None
) -> Callable[..., Columns]:
    function = getattr(load_file(path), name)
    if not callable(function):
        raise ValueError(f"{name} is a {type(function).__name__}; make it a function")
    return by_names(function, arguments, of_one)


def _load_scorer(scorer: Scorer, module: str | None) -> Callable[..., Columns]:
    if module is not None:
        # Now, and not within the time that the first responses have.
        importlib.import_module(module)
    return by_names(partial(scored, scorer))


def by_names(
    function: RewardFunction, arguments: Mapping[str, Any] | None = None, of_one: bool | None = None
) -> Callable[..., Columns]:
    """Make a function of the columns queries, prompts, labels, responses and rows.

    `rows` says of each response what else is known: `data_source`, `columns` (a mapping, the data's other columns),
    `completion_ids` and `step`. Prompts are text, but for a function that takes `completions` and data whose prompts
    are chat messages: it is given messages for both, as by TRL. `arguments` are given besides.

    The function may be async, and returns for each response a number, None (there is no reward) or a dict with `score`,
    in any kind of list; or a dict with `rewards` (see `read_columns`).
    """
    parameters = list(inspect.signature(function).parameters.values())
    names, given = {parameter.name for parameter in parameters}, dict(arguments or {})
    if names.intersection(OF_ONE[:3]) if of_one is None else of_one:

        def call_each(*columns: Sequence[Any]) -> Columns:
            rows = [_of_one(*row) | given for row in zip(*columns)]
            arguments = [_chosen(parameters, row, {*OF_ONE, *given}) for row in rows]
            return read_scores([_awaited(function(**each)) for each in arguments])

        return call_each
    is_trl = bool(names.intersection(TRL)) and names.isdisjoint({*OURS} - {*TRL})
    others = TRL if is_trl else OURS if of_one is None else OF_ALL

    def call(queries: Sequence[str], *columns: Sequence[Any]) -> Columns:
        logs, texts = dict[str, Any](), dict[str, list[str | None]]()
        known = _of_all(queries, *columns) | {
            "log_metric": logs.__setitem__,
            "log_extra": lambda name, values: texts.__setitem__(str(name), [str(value) for value in values]),
        }
        if is_trl:
            _as_messages(known)
        known |= given
        for_all = {*others, *given}
        if others is not OF_ALL:  # verl gives no more than its own
            for_all.update(name for row in columns[-1] for name in row.get("columns", {}))
        found = read_rewards(_awaited(_called(function, parameters, known, for_all)), len(queries))
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
    extras = [of.get("extra_info", of) for of in others]
    known: dict[str, Any] = {name: [of.get(name) for of in others] for of in others for name in of}
    known |= dict(zip(OURS, (queries, prompts, labels, responses)))
    known |= {"completions": responses, "completion_ids": [row.get("completion_ids", []) for row in rows]}
    known["trainer_state"] = SimpleNamespace(global_step=rows[0].get("step", 0) if rows else 0)
    return known | dict(zip(OF_ALL, (sources, responses, labels, extras)))


def _as_messages(known: dict[str, Any]) -> None:
    """TRL's functions read chat messages where the data's prompts are such."""
    prompts = known.get("prompt", [])
    if prompts and all(map(are_messages, prompts)):
        known["prompts"] = prompts
        known["completions"] = [[{"role": "assistant", "content": text}] for text in known["completions"]]


def _called(
    function: RewardFunction, parameters: Sequence[inspect.Parameter], known: dict[str, Any], others: Collection[str]
) -> Any:
    """Call a function for all responses: by names, or with the first three by their places if they have other names."""
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = [p.name for p in places if p.default is p.empty][:3]
    renamed = len(first) == 3 and OURS[0] in others and not {*first} <= known.keys()
    if not renamed and (places or not any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        return function(**_chosen(parameters, known, others))
    left = [p for p in parameters if p.name not in first]
    return function(*(known[name] for name in OURS[:3]), **_chosen(left, known, {*others} - {*OURS[:3]}))


def _chosen(
    parameters: Sequence[inspect.Parameter], known: Mapping[str, Any], others: Collection[str]
) -> dict[str, Any]:
    """The arguments of a function by name; with `**` it is given `others` too.

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
    names = {p.name for p in named}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names.update(others)
    return {name: known[name] for name in known if name in names}


def _awaited(found: Any) -> Any:
    """What a function returned, once it is there; an async one is waited for."""

    async def wait() -> Any:
        return await found

    return asyncio.run(wait()) if inspect.isawaitable(found) else found


def read_scores(found: Sequence[Any]) -> Columns:
    """Read what a function returned for each response: a number, or a dict with `score`.

    Other numbers of a dict are logged, NaN where a response lacks one; whatever else it holds is kept as text.
    """
    rows = [dict(item) if isinstance(item, Mapping) else {"score": item} for item in found]
    for row in rows:
        if "score" not in row:
            raise ValueError(f"returned a dict with the keys {sorted(map(str, row))}; it needs 'score'")
    scores = read_columns({"rewards": [row.pop("score") for row in rows]}, len(rows)).rewards
    logs: dict[str, list[float]] = {}
    texts: dict[str, list[str | None]] = {}
    for place, row in enumerate(rows):
        for name, given in row.items():
            value = given.tolist() if hasattr(given, "tolist") else given
            if isinstance(value, numbers.Real) and name != PREDICTION:
                logs.setdefault(str(name), [math.nan] * len(rows))[place] = float(value)
            elif value is not None:
                texts.setdefault(str(name), [None] * len(rows))[place] = str(value)
    return Columns(scores, scores, logs, texts)
