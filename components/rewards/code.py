"""Reward code that runs in child processes, and the reading of its results.

A scorer is code of its own. Functions of a user's file are provided by a plug-in. This module does not import torch.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from components.data.values import label_text
from components.registry import load
from components.rewards.base import FUNCTIONS, Columns, is_reward_file, read_columns
from components.rewards.errors import WrongCountError
from components.rewards.scorers import Scorer, get_scorer, module_of

CONCURRENT_CALLS = 64
"""Maximum number of calls of an async function for one response that a process awaits at the same time."""
PREDICTION = "pred"
"""Key of the answer that a function extracted from a response. It is logged as text, even if it looks like a number."""


@dataclass(frozen=True, kw_only=True)
class RewardCode:
    """Reward code that runs in child processes."""

    source: str
    """Name of the code in error messages."""
    load: Callable[[], Callable[..., Columns]]
    """Called in a child process. Returns a function of the columns queries, prompts, labels, responses and
    rows."""
    reads_rows: bool = True
    """True if the code reads more than queries, prompts, labels and responses."""
    of_one: bool = False
    """True if the code handles one response at a time. The size of chunks is then adapted to its speed."""
    of_batch: bool = False
    """True if one call handles all responses of a batch. Its timeout is then that of all responses together."""


class ConcurrentFunction:
    """Base class of reward code that limits the time of each response itself."""

    timeout_s: float | None = None
    """Timeout of one call in seconds. None sets no limit."""


def code_of(spec: str, arguments: Mapping[str, Any] | None = None, of_one: bool | None = None) -> RewardCode:
    """Return the code of a scorer, or of a function of a user's file.

    Args:
        spec: name of a scorer, `FILE.py` or `FILE.py:NAME`.
        arguments: further arguments of a file's function.
        of_one: True calls a file's function once for each response, False once for all responses of a batch. By default
            the names of its parameters decide.

    Raises:
        ValueError: the scorer or function does not exist.
    """
    if is_reward_file(spec):
        return load(FUNCTIONS, "file", f"reward.source={spec}")(spec, arguments, of_one)
    scorer = get_scorer(spec)
    loader = partial(_load_scorer, scorer, module_of(scorer))
    return RewardCode(source=f"scorer {spec!r}", load=loader, reads_rows=False)


def scored(scorer: Scorer, solution_str: str, ground_truth: Any) -> float | dict[str, float]:
    """Call a scorer with the arguments of verl's signature."""
    return scorer(solution_str, label_text(ground_truth))


# The rest of this module runs in a child process.


def _load_scorer(scorer: Scorer, module: str | None) -> Callable[..., Columns]:
    if module is not None:
        # Imported at the start, because the import could exceed the timeout of the first responses.
        importlib.import_module(module)

    def score(_queries: Any, _prompts: Any, labels: Sequence[Any], responses: Sequence[str], _rows: Any) -> Columns:
        pairs = zip(responses, labels)
        return read_scores([awaited(scored(scorer, response, label)) for response, label in pairs])

    return score


_run: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run
"""Function that runs a coroutine; `one_event_loop` replaces it."""


@contextmanager
def one_event_loop() -> Iterator[None]:
    """Await all async functions of this process in one event loop, so that clients that they keep stay usable."""
    global _run
    # HTTP clients are bound to their event loop, and asyncio.run makes a new one for every call.
    with asyncio.Runner() as runner:
        _run = runner.run
        try:
            yield
        finally:
            _run = asyncio.run


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, in the event loop of `one_event_loop` if it is active."""
    return _run(coroutine)


def awaited(result: Any) -> Any:
    """Return the result of a function. An awaitable result is awaited first."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return _run(wait())


def plain(value: Any) -> Any:
    """Convert a tensor or an array to Python numbers. Other values are returned unchanged."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def read_scores(results: Sequence[Any]) -> Columns:
    """Read the result of a function for each response: a number, None (no reward), or a dict with `score`.

    Other numbers of a dict are logged, as NaN for responses without them. All other values of a dict are kept as text.

    Raises:
        ValueError: a result is not understood, or is not finite.
    """
    rows = [dict(result) if isinstance(result, Mapping) else {"score": result} for result in results]
    absent = [i for i, row in enumerate(rows) if row.get("score", 0) is None]
    for i in absent:
        rows[i]["score"] = 0.0
    for row in rows:
        if "score" not in row:
            raise ValueError(f"returned a dict with the keys {sorted(map(str, row))}; it needs 'score'")
    try:
        scores = read_columns({"rewards": [row.pop("score") for row in rows]}, len(rows)).rewards
    except WrongCountError as error:  # a value is a list, which is an error of that response and not of the batch
        raise ValueError(str(error)) from error
    logs: dict[str, list[float]] = {}
    texts: dict[str, list[str | None]] = {}
    for i, row in enumerate(rows):
        for name, item in row.items():
            value = plain(item)
            if isinstance(value, numbers.Real) and name != PREDICTION:
                logs.setdefault(str(name), [math.nan] * len(rows))[i] = float(value)
            elif value is not None:
                texts.setdefault(str(name), [None] * len(rows))[i] = str(value)
    return Columns(scores, scores, logs, texts, absent)
