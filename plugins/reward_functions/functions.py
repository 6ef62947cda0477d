"""Users' reward functions in several signatures. Each function is called by the names of its parameters.

    reward_func(queries, prompts, labels, responses, **columns)                     OpenRLHF's signature, and ours
    accuracy(prompts, completions, completion_ids, trainer_state, **columns)        TRL's
    compute_score(data_source, solution_str, ground_truth, extra_info)              verl's, for one response
    compute_score(data_sources, solution_strs, ground_truths, extra_infos)          verl's, for all of them

Any column of the data may be a parameter. B is the number of responses. This module runs in the process of the function
and does not import torch.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from components.data.messages import ASSISTANT, are_messages
from components.process.child_process import described
from components.process.code_files import load_file
from components.rewards.base import Columns, read_columns
from components.rewards.code import (
    CONCURRENT_CALLS,
    ConcurrentFunction,
    RewardCode,
    awaited,
    plain,
    read_scores,
    run_coroutine,
)
from components.rewards.errors import WrongCountError
from components.rewards.files import reward_function

RewardFunction = Callable[..., Any]

OF_ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
"""verl's parameters. A function with one of the first three is called once for each response."""
OF_ALL = tuple(f"{name}s" for name in OF_ONE)
"""verl's parameters of a function for all responses."""
OURS = ("queries", "prompts", "labels", "responses")
"""OpenRLHF's parameters and `responses`. The first three are passed by position to functions with other names."""
TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""TRL's parameters."""


def code_of_file(spec: str, arguments: Mapping[str, Any] | None = None, of_one: bool | None = None) -> RewardCode:
    """Return the code of a function of a user's file; see `code_of`."""
    path, name = reward_function(spec)
    load = partial(_load_function, path, name, arguments, of_one)
    return RewardCode(source=f"{name} in {str(path)!r}", load=load, of_one=of_one is True, of_batch=of_one is False)


# The rest of this module runs in a child process.


def _load_function(
    path: Path, name: str, arguments: Mapping[str, Any] | None, of_one: bool | None
) -> Callable[..., Columns]:
    function = getattr(load_file(path), name)
    if not callable(function):
        raise ValueError(f"{name} is a {type(function).__name__}; make it a function")
    return by_names(function, arguments, of_one)


def by_names(
    function: RewardFunction, arguments: Mapping[str, Any] | None = None, of_one: bool | None = None
) -> Callable[..., Columns]:
    """Wrap a reward function as a function of five columns. The function is called by the names of its parameters.

    The columns are queries, prompts, labels, responses and rows. An entry of `rows` holds further values of a response:
    `data_source`, `columns` (a mapping with the other columns of the data), `completion_ids` and `step`.

    The function may be async. It returns a list (or tensor, or array) with a number, None (no reward) or a dict with
    `score` for each response; or a dict with `rewards` (see `read_columns`). Prompts are text. A function with the
    parameter `completions` gets prompts and completions as chat messages, as in TRL, if the prompts of the data are
    messages.

    Args:
        function: a function with one of the signatures above.
        arguments: further keyword arguments.
        of_one: True calls the function once for each response, False once for all responses. By default the names of
            its parameters decide.
    """
    parameters = list(inspect.signature(function).parameters.values())
    names = {parameter.name for parameter in parameters}
    keyword_arguments = dict(arguments or {})
    if of_one or (of_one is None and not names.isdisjoint(OF_ONE[:3])):
        return _wrap_response_function(function, parameters, keyword_arguments)
    signature = OF_ALL
    if _is_trl(names):
        signature = TRL
    elif of_one is None:
        signature = OURS
    return _wrap_batch_function(function, parameters, keyword_arguments, signature)


def _wrap_response_function(
    function: RewardFunction, parameters: Sequence[inspect.Parameter], arguments: dict[str, Any]
) -> Callable[..., Columns]:
    """Wrap a function for one response. An async function is awaited for several responses concurrently."""
    kwargs_names = {*OF_ONE, *arguments}

    def call_one(*row: Any) -> Any:
        return function(**_chosen(parameters, _response_arguments(*row) | arguments, kwargs_names))

    # An object with an async __call__ counts as an async function too.
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        return ConcurrentCalls(call_one)
    return lambda *columns: read_scores([awaited(call_one(*row)) for row in zip(*columns)])


def _wrap_batch_function(
    function: RewardFunction,
    parameters: Sequence[inspect.Parameter],
    arguments: Mapping[str, Any],
    signature: tuple[str, ...],
) -> Callable[..., Columns]:
    """Wrap a function for all responses.

    Args:
        function: function of the user.
        parameters: parameters of the function.
        arguments: further keyword arguments.
        signature: names of the arguments that a function with `**kwargs` gets: OURS, TRL or OF_ALL.
    """

    def call(queries: Sequence[str], *columns: Sequence[Any]) -> Columns:
        logs: dict[str, Any] = {}
        texts: dict[str, list[str | None]] = {}

        def log_extra(name: str, values: Sequence[Any]) -> None:
            texts[str(name)] = [str(value) for value in values]

        values = _batch_arguments(queries, *columns) | {"log_metric": logs.__setitem__, "log_extra": log_extra}
        if signature is TRL:
            _as_messages(values)
        values |= arguments
        kwargs_names = {*signature, *arguments}
        if signature is not OF_ALL:  # verl does not pass columns of the data to **kwargs
            kwargs_names.update(name for row in columns[-1] for name in row.get("columns", {}))
        result = read_rewards(awaited(_call(function, parameters, values, kwargs_names)), len(queries))
        logged = read_columns({"rewards": result.rewards, "extra_logs": logs}, len(queries)).logs
        return Columns(result.rewards, result.scores, result.logs | logged, result.texts | texts, result.absent)

    return call


def column_parameters(function: RewardFunction) -> list[str]:
    """Return the required parameters of a function in TRL's or verl's signature that must be columns of the data."""
    # Optional parameters need no column: the function has a default for them.
    parameters = inspect.signature(function).parameters.values()
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    names = {p.name for p in parameters}
    if not _is_trl(names) and names.isdisjoint((*OF_ONE, *OF_ALL)):
        return []
    return [name for name in required if name not in {*OF_ONE, *OF_ALL, *OURS, *TRL, "query", "prompt"}]


def _is_trl(names: Collection[str]) -> bool:
    return not {*TRL}.isdisjoint(names) and ({*OURS} - {*TRL}).isdisjoint(names)


@dataclass
class ConcurrentCalls(ConcurrentFunction):
    """Async function for one response, awaited for up to CONCURRENT_CALLS responses at the same time.

    A call that raises, exceeds the timeout or returns no number fails only for its own response.
    """

    call: Callable[..., Coroutine[Any, Any, Any]]
    """Function of the columns of one response."""

    def __call__(self, *columns: Sequence[Any]) -> Columns:
        """Return the rewards of all responses, and the failures by index."""
        outcomes = run_coroutine(self._gather(list(zip(*columns))))
        failures: dict[int, tuple[str, str]] = {}
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, tuple):
                failures[i] = outcome
                outcomes[i] = None
        result = read_scores(outcomes)
        absent = [i for i in result.absent if i not in failures]
        return Columns(result.rewards, result.scores, result.logs, result.texts, absent, failures)

    async def _gather(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        # Unlimited concurrency would exhaust the connections of the services that such functions call.
        slots = asyncio.Semaphore(CONCURRENT_CALLS)

        async def outcome_of(row: Sequence[Any]) -> Any:
            async with slots:
                return await self._outcome_of(row)

        return await asyncio.gather(*map(outcome_of, rows))

    async def _outcome_of(self, row: Sequence[Any]) -> Any:
        """Return the result of the function if it can be read, or a tuple of reason and traceback."""
        timeout = asyncio.timeout(self.timeout_s)
        try:
            async with timeout:
                value = await self.call(*row)
            # Read once by itself, so that an unreadable result fails only this response.
            read_scores([value])
            if isinstance(value, tuple):  # a tuple would be taken for a failure
                return list(value)
            return value
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything, and fails for one response
            if timeout.expired():
                return (f"no result after {self.timeout_s:g} s", "")
            return described(error)


def read_rewards(result: Any, count: int) -> Columns:
    """Read the result of a function for `count` responses.

    Raises:
        WrongCountError: there are more or fewer rewards than responses.
        ValueError: the result is not understood, or a number is not finite.
    """
    result = plain(result)
    # `read_columns` rejects sets, which have no order, and bytes, whose items happen to be numbers.
    if isinstance(result, (Mapping, str, bytes, bytearray, set, frozenset)) or not hasattr(result, "__len__"):
        return read_columns(result, count)
    values = list(result)
    if len(values) != count:
        types = "".join(f", of type {type(value).__name__}" for value in values[:1])
        raise WrongCountError(
            f"returned {len(values)} rewards for {count} responses{types}; return one number for each response"
        )
    if any(isinstance(value, Mapping) for value in values):
        return read_scores(values)
    absent = [i for i, value in enumerate(values) if value is None]
    # A placeholder, because rewards must be numbers; `absent` marks it.
    for i in absent:
        values[i] = 0.0
    columns = read_columns({"rewards": values}, count)
    return Columns(columns.rewards, columns.scores, {}, {}, absent)


def _response_arguments(query: str, prompt: str, label: Any, response: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return all possible arguments of a function for one response, by name."""
    # Data in verl's layout has a column `extra_info`. For other data all columns take its place.
    columns = row.get("columns", {})
    extra_info = columns.get("extra_info", columns)
    arguments = dict(zip(OF_ONE, (row.get("data_source", ""), response, label, extra_info)))
    return columns | arguments | {"query": query, "prompt": prompt}


def _batch_arguments(
    queries: Sequence[str],
    prompts: Sequence[str],
    labels: Sequence[Any],
    responses: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return all possible arguments of a function for all responses, by name.

    Columns of the data come first, so that the names of the signatures win over columns with the same name.
    """
    columns = [row.get("columns", {}) for row in rows]
    sources = [row.get("data_source", "") for row in rows]
    extra_infos = [row_columns.get("extra_info", row_columns) for row_columns in columns]
    values: dict[str, Any] = {}
    for name in dict.fromkeys(name for row_columns in columns for name in row_columns):
        values[name] = [row_columns.get(name) for row_columns in columns]
    values |= dict(zip(OURS, (queries, prompts, labels, responses)))
    values |= {"completions": responses, "completion_ids": [row.get("completion_ids", []) for row in rows]}
    steps = [row.get("step", 0) for row in rows]
    values["trainer_state"] = SimpleNamespace(global_step=next(iter(steps), 0))
    return values | dict(zip(OF_ALL, (sources, responses, labels, extra_infos)))


def _as_messages(values: dict[str, Any]) -> None:
    """Replace prompts and completions by chat messages, as in TRL, in rows whose prompt is a list of messages in the
    data.

    Each row is decided separately, so that a result does not depend on the other rows of its chunk. If the policy
    continued an assistant message, that message is the beginning of the completion.
    """
    prompts = values.get("prompt") or [None] * len(values["prompts"])
    if not any(map(are_messages, prompts)):
        return
    texts = list(values["prompts"])
    completions = list(values["completions"])
    for i, messages in enumerate(prompts):
        if are_messages(messages):
            texts[i], completions[i] = _conversation(messages, completions[i])
    values["prompts"] = texts
    values["completions"] = completions


def _conversation(prompt: Any, completion: str) -> tuple[list[Any], list[dict[str, str]]]:
    """Return the messages of the prompt, and the completion as a message of the assistant.

    A last message of the assistant in the prompt is the start of the completion, unless it only calls tools.
    """
    before = list(prompt)
    if before and before[-1]["role"] == ASSISTANT and before[-1]["content"] is not None:
        completion = before.pop()["content"] + completion
    return before, [{"role": ASSISTANT, "content": completion}]


def _call(
    function: RewardFunction,
    parameters: Sequence[inspect.Parameter],
    values: dict[str, Any],
    kwargs_names: Collection[str],
) -> Any:
    """Call a function for all responses by the names of its parameters.

    A function in OpenRLHF's signature may have other names for its first three parameters, or only `*args`. It then
    gets queries, prompts and labels by position.

    Args:
        function: function of the user.
        parameters: parameters of the function.
        values: values of all possible arguments, by name.
        kwargs_names: names of the arguments that a function with `**kwargs` gets.
    """
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty][:3]
    has_other_names = OURS[0] in kwargs_names and len(required) == 3 and not {*required} <= values.keys()
    has_only_args = not positional and any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not has_other_names and not has_only_args:
        return function(**_chosen(parameters, values, kwargs_names))
    # These three are passed by position, so they must not be passed by name again.
    first = OURS[:3]
    others = [p for p in parameters if p.name not in required]
    arguments = _chosen(others, values, {*kwargs_names}.difference(first))
    return function(*(values[name] for name in first), **arguments)


def _chosen(
    parameters: Sequence[inspect.Parameter], values: Mapping[str, Any], kwargs_names: Collection[str]
) -> dict[str, Any]:
    """Select the arguments of a function by the names of its parameters. A function with `**` gets `kwargs_names` too.

    Raises:
        TypeError: a required parameter has no value.
    """
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in values]
    if missing:
        raise TypeError(
            f"it takes {', '.join(map(repr, missing))}, and there is no such column in the data; there are "
            f"{', '.join(sorted(values))}"
        )
    names = {p.name for p in named}
    # Not all values: functions of OpenRLHF do not expect TRL's arguments in **kwargs, and vice versa.
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names.update(kwargs_names)
    return {name: values[name] for name in values if name in names}
