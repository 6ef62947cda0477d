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
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from components.data.cells import label_text
from components.data.messages import ASSISTANT, are_messages
from components.process.child_process import described, load_file
from components.rewards.base import Columns, is_reward_file, read_columns, reward_function
from components.rewards.errors import WrongCountError
from components.rewards.scorers import Scorer, get_scorer, module_of

RewardFunction = Callable[..., Any]

OF_ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
"""verl's parameters; a function that takes one of the first three is called for each response alone."""
OF_ALL = tuple(f"{name}s" for name in OF_ONE)
"""verl's parameters of a function for all responses."""
OURS = ("queries", "prompts", "labels", "responses")
"""OpenRLHF's parameters and one more; the first three are given by their places where they are called otherwise."""
CONCURRENT_CALLS = 64
"""Maximum number of calls of an async function for one response that a process awaits at the same time."""
TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


PREDICTION = "pred"
"""What a function says that it took for the answer: text, whatever it looks like."""


@dataclass(frozen=True, kw_only=True)
class RewardCode:
    """Code that rewards responses in processes of its own."""

    source: str
    """What errors call it."""
    load: Callable[[], Callable[..., Columns]]
    """Returns, in such a process, a function that `by_names` has wrapped."""
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
    scorer = get_scorer(spec)
    load = partial(_load_scorer, scorer, module_of(scorer))
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
    """Wrap a reward function, which is called by the names of its parameters, as a function of five columns.

    The columns are queries, prompts, labels, responses and rows. An entry of `rows` holds what else is known of a
    response: `data_source`, `columns` (a mapping, the data's other columns), `completion_ids` and `step`.

    The function may be async. It returns for each response a number, None (there is no reward) or a dict with `score`,
    in any kind of list; or a dict with `rewards` (see `read_columns`). Prompts are text. A function that takes
    `completions` is given chat messages for both, as by TRL, where the data's prompts are messages.

    Args:
        function: in one of the signatures above.
        arguments: further keyword arguments.
        of_one: call the function for each response alone (or, False, for all responses at once). Default: as its
            parameters are named.
    """
    parameters = list(inspect.signature(function).parameters.values())
    names = {parameter.name for parameter in parameters}
    takes_one = bool(names.intersection(OF_ONE[:3])) if of_one is None else of_one
    if takes_one:
        return _for_one(function, parameters, dict(arguments or {}))
    usual = OURS if of_one is None else OF_ALL
    return _for_all(function, parameters, dict(arguments or {}), TRL if _is_trl(names) else usual)


def _for_one(
    function: RewardFunction, parameters: Sequence[inspect.Parameter], arguments: dict[str, Any]
) -> Callable[..., Columns]:
    """Wrap a function for one response. An async function is awaited for several responses at the same time."""
    offered = {*OF_ONE, *arguments}

    def call_one(*row: Any) -> Any:
        return function(**_chosen(parameters, _of_one(*row) | arguments, offered))

    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        return ConcurrentCalls(call_one)
    return lambda *columns: read_scores([_awaited(call_one(*row)) for row in zip(*columns)])


def _for_all(
    function: RewardFunction,
    parameters: Sequence[inspect.Parameter],
    arguments: Mapping[str, Any],
    signature: tuple[str, ...],
) -> Callable[..., Columns]:
    """Wrap a function for all responses.

    Args:
        function: of the user.
        parameters: of the function.
        arguments: further keyword arguments.
        signature: names that a function with `**kwargs` is given: OURS, TRL or OF_ALL.
    """

    def call(queries: Sequence[str], *columns: Sequence[Any]) -> Columns:
        logs: dict[str, Any] = {}
        texts: dict[str, list[str | None]] = {}

        def log_extra(name: str, values: Sequence[Any]) -> None:
            texts[str(name)] = [str(value) for value in values]

        known = _of_all(queries, *columns) | {"log_metric": logs.__setitem__, "log_extra": log_extra}
        if signature is TRL:
            _as_messages(known)
        known |= arguments
        offered = {*signature, *arguments}
        if signature is not OF_ALL:  # verl gives no columns of the data
            offered.update(name for row in columns[-1] for name in row.get("columns", {}))
        returned = _awaited(_call(function, parameters, known, offered))
        read = read_rewards(returned, len(queries))
        logged = read_columns({"rewards": read.rewards, "extra_logs": logs}, len(queries)).logs
        return Columns(read.rewards, read.scores, read.logs | logged, read.texts | texts, read.absent)

    return call


def column_parameters(function: RewardFunction) -> list[str]:
    """Return the parameters of a function in TRL's or verl's signature that only columns of the data can fill."""
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
class ConcurrentCalls:
    """An async function for one response that is awaited for up to CONCURRENT_CALLS responses at the same time.

    A response whose call raises, takes longer than the timeout or returns no number fails alone.
    """

    call: Callable[..., Coroutine[Any, Any, Any]]
    """Takes the columns of one response."""
    timeout_s: float | None = None
    """Seconds that one call may take. None: no limit."""

    def __call__(self, *columns: Sequence[Any]) -> Columns:
        """Return the rewards of all responses, with the failures by place."""
        outcomes = _run(self._gather(list(zip(*columns))))
        failures = {place: outcome for place, outcome in enumerate(outcomes) if isinstance(outcome, tuple)}
        read = read_scores([None if isinstance(outcome, tuple) else outcome for outcome in outcomes])
        absent = [place for place in read.absent if place not in failures]
        return Columns(read.rewards, read.scores, read.logs, read.texts, absent, failures)

    async def _gather(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        slots = asyncio.Semaphore(CONCURRENT_CALLS)

        async def outcome_of(row: Sequence[Any]) -> Any:
            async with slots:
                return await self._outcome_of(row)

        return await asyncio.gather(*map(outcome_of, rows))

    async def _outcome_of(self, row: Sequence[Any]) -> Any:
        """Return what the function returned, if it is readable, or a tuple of reason and traceback."""
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                value = await self.call(*row)
            read_scores([value])
            return list(value) if isinstance(value, tuple) else value
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything, and fails for one response
            if limit.expired():
                return f"no result after {self.timeout_s:g} s", ""
            return described(error)


def read_rewards(found: Any, count: int) -> Columns:
    """Read what a function returned for `count` responses; ValueError says what is wrong."""
    found = found.tolist() if hasattr(found, "tolist") else found
    # A set has no order, and the items of bytes are numbers that nobody meant.
    if isinstance(found, (Mapping, str, bytes, bytearray, set, frozenset)) or not hasattr(found, "__len__"):
        return read_columns(found, count)
    values = list(found)
    if len(values) != count:
        of_type = f", of type {type(values[0]).__name__}" if values else ""
        raise WrongCountError(
            f"returned {len(values)} rewards for {count} responses{of_type}; return one number for each response"
        )
    if any(isinstance(value, Mapping) for value in values):
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
    """Replace prompt and completion by chat messages, as TRL has them, in rows whose prompt in the data is such.

    Each row decides for itself, so that a result does not depend on the rows beside it in a chunk. A message of the
    assistant that the policy has continued is the beginning of the completion.
    """
    prompts = known.get("prompt") or [None] * len(known["prompts"])
    if not any(map(are_messages, prompts)):
        return
    rows = zip(prompts, known["prompts"], known["completions"])
    pairs = [
        _conversation(messages, completion) if are_messages(messages) else (text, completion)
        for messages, text, completion in rows
    ]
    known["prompts"], known["completions"] = map(list, zip(*pairs))


def _conversation(prompt: Any, completion: str) -> tuple[list[Any], list[dict[str, str]]]:
    """Return the prompt's messages and the completion as a message of the assistant, which may have begun it."""
    begun = prompt[-1]["content"] if prompt and prompt[-1]["role"] == ASSISTANT else None
    before = list(prompt) if begun is None else list(prompt[:-1])
    return before, [{"role": ASSISTANT, "content": (begun or "") + completion}]


def _call(
    function: RewardFunction, parameters: Sequence[inspect.Parameter], known: dict[str, Any], offered: Collection[str]
) -> Any:
    """Call a function for all responses by the names of its parameters.

    A function in OpenRLHF's signature may name its first three parameters as it likes, or take `*args` alone: it gets
    queries, prompts and labels by position.

    Args:
        function: of the user.
        parameters: of the function.
        known: values of all arguments, by name.
        offered: names of those that a function with `**kwargs` is given.
    """
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty][:3]
    has_own_names = OURS[0] in offered and len(required) == 3 and not {*required} <= known.keys()
    takes_args_alone = not positional and any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not has_own_names and not takes_args_alone:
        return function(**_chosen(parameters, known, offered))
    first = OURS[:3]
    others = [p for p in parameters if p.name not in required]
    return function(*(known[name] for name in first), **_chosen(others, known, {*offered}.difference(first)))


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


_run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run


@contextmanager
def one_event_loop() -> Iterator[None]:
    """Await all async functions of this process in one event loop, so that a client which they keep stays usable."""
    global _run
    with asyncio.Runner() as runner:
        _run = runner.run
        try:
            yield
        finally:
            _run = asyncio.run


def _awaited(found: Any) -> Any:
    """Return what a function returned; an awaitable is awaited."""

    async def wait() -> Any:
        return await found

    return _run(wait()) if inspect.isawaitable(found) else found


def read_scores(found: Sequence[Any]) -> Columns:
    """Read what a function returned for each response: a number, None (there is no reward), or a dict with `score`.

    Other numbers of a dict are logged, NaN where a response lacks one; whatever else it holds is kept as text.
    """
    rows = [dict(item) if isinstance(item, Mapping) else {"score": item} for item in found]
    absent = [place for place, row in enumerate(rows) if row.get("score", 0) is None]
    for place in absent:
        rows[place]["score"] = 0.0
    for row in rows:
        if "score" not in row:
            raise ValueError(f"returned a dict with the keys {sorted(map(str, row))}; it needs 'score'")
    try:
        scores = read_columns({"rewards": [row.pop("score") for row in rows]}, len(rows)).rewards
    except WrongCountError as error:  # one of the values is a list: a fault of that response
        raise ValueError(str(error)) from error
    logs: dict[str, list[float]] = {}
    texts: dict[str, list[str | None]] = {}
    for place, row in enumerate(rows):
        for name, given in row.items():
            value = given.tolist() if hasattr(given, "tolist") else given
            if isinstance(value, numbers.Real) and name != PREDICTION:
                logs.setdefault(str(name), [math.nan] * len(rows))[place] = float(value)
            elif value is not None:
                texts.setdefault(str(name), [None] * len(rows))[place] = str(value)
    return Columns(scores, scores, logs, texts, absent)
