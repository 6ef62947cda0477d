"""Reward functions in verl's signature, by the data source of a row, or from a user's file.

    compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> number | {"score": number, ...}

B answers. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from components.data.child_process import load_file
from components.data.rewards import Columns, check_defines, read_columns
from components.data.scorers import REASONING_GYM, REASONING_GYM_PREFIX, get_scorer, get_style, scorer_names

ScoreFunction = Callable[..., Any]

PREDICTION = "pred"
"""What a function says that it took for the answer: text, whatever it looks like."""

SCORER_OF = {
    **dict.fromkeys(("openai/gsm8k", "Rowan/hellaswag"), "gsm8k"),
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"),
    **dict.fromkeys(("math_dapo", "math_dapo_reasoning", "aime*", "numina_*"), "math"),
    f"{REASONING_GYM_PREFIX}*": REASONING_GYM,
}
"""The scorers of data sources that are not called as they are. A `*` stands for any end of a name."""


def default_functions() -> dict[str, ScoreFunction]:
    """The built-in functions by data source; a scorer's or a task's own name is one as well."""
    of_themselves = {name: name for name in scorer_names()}
    return {source: partial(by_scorer, scorer) for source, scorer in (of_themselves | SCORER_OF).items()}


def by_scorer(
    scorer: str,
    data_source: str,  # noqa: ARG001 - part of the signature
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001 - as above
) -> dict[str, float]:
    """A scorer in verl's signature, with what it has to say of how the response is written."""
    pair = (solution_str, str(ground_truth))
    return {**get_style(scorer)(*pair), "score": get_scorer(scorer)(*pair)}


def find_function(functions: Mapping[str, ScoreFunction], source: str) -> ScoreFunction | None:
    """The function of a data source, or the one whose name ends in a `*` and begins as the data source does."""
    if source in functions:
        return functions[source]
    begins = (name for name in functions if name.endswith("*") and source.startswith(name[:-1]))
    return next((functions[name] for name in begins), None)


@dataclass(frozen=True, kw_only=True)
class ScoreCode:
    """What scores answers: a function of a file, or one for each data source."""

    path: str | None = None
    """A Python file; None: `functions` are asked."""
    name: str = "compute_score"
    """The file's function; it may be async."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of it."""
    lists: bool = False
    """The file's function takes all answers of a batch at once, as lists: data_sources, solution_strs, ground_truths,
    extra_infos; it returns one number or dict for each."""
    functions: Mapping[str, ScoreFunction] = field(default_factory=default_functions)
    """By data source; from the top level of modules, as they run in other processes."""
    optional: bool = False
    """An answer to a prompt of a data source without a function scores 0; otherwise it has no score, and has failed."""

    @property
    def whole_batches(self) -> bool:
        """Whether a batch is scored by one call."""
        return self.lists and self.path is not None

    def check(self) -> None:
        """Refuse a file that is not there or lacks the function, without running it."""
        if self.path is not None:
            usage = f"{self.name}(data_source, solution_str, ground_truth, extra_info=None)"
            check_defines(self.path, "reward file", [self.name], usage, may_be_async=True)

    def knows(self, source: str) -> bool:
        """Whether there is a function for answers to prompts of this data source."""
        return self.path is not None or find_function(self.functions, source) is not None

    def unknown(self, sources: Iterable[str]) -> list[str]:
        """The data sources without a function, each once."""
        return sorted({source for source in sources if not self.knows(source)})

    def check_labels(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """See that the built-in functions can read the labels; the first of each data source shows it.

        Raises:
            ValueError: one cannot, or needs a package that is not there.
        """
        first = {row["datasource"]: row for row in reversed(rows)} if self.path is None else {}
        for source, row in first.items():
            if (function := find_function(self.functions, source)) is not None:
                try:
                    function(source, "", row["label"], row.get("extra_info"))
                except ValueError as error:
                    raise ValueError(f"data source {source!r}: {error}") from error


# What follows runs in a child.


def load_scores(code: ScoreCode) -> Callable[..., Columns]:
    """Make a function of the columns sources, prompts, responses, labels and extras."""
    function: ScoreFunction = partial(_by_source, code)
    if code.path is not None:
        function = getattr(load_file(Path(code.path).expanduser().resolve()), code.name)
    if not callable(function):
        raise ValueError(f"{code.name} is a {type(function).__name__}; make it a function")
    if code.whole_batches:
        return partial(_score_lists, partial(function, **code.kwargs))
    return partial(_score_each, partial(function, **code.kwargs))


def _by_source(code: ScoreCode, data_source: str, **columns: Any) -> Any:
    function = find_function(code.functions, data_source)
    if function is None and not code.optional:
        raise ValueError(f"there is no reward function for data source {data_source!r}")
    return 0.0 if function is None else function(data_source, **columns)


def _score_lists(function: ScoreFunction, *columns: Sequence[Any]) -> Columns:
    sources, _, responses, labels, extras = columns
    found = awaited(function(data_sources=sources, solution_strs=responses, ground_truths=labels, extra_infos=extras))
    found = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(found, Sequence) or len(found) != len(sources):
        size = f" of length {len(found)}" if isinstance(found, Sequence) else ""
        raise ValueError(f"returned a {type(found).__name__}{size} for {len(sources)} responses; return one for each")
    return read_scores(found)


def _score_each(function: ScoreFunction, *columns: Sequence[Any]) -> Columns:
    sources, _, responses, labels, extras = columns
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    rows = zip(sources, responses, labels, extras, strict=True)
    return read_scores([awaited(function(**dict(zip(names, row, strict=True)))) for row in rows])


def awaited(found: Any) -> Any:
    """What a function returned, once it is there; an async one is waited for."""

    async def wait() -> Any:
        return await found

    return asyncio.run(wait()) if inspect.isawaitable(found) else found


def read_scores(found: Sequence[Any]) -> Columns:
    """Read what a function returned for each answer: a number, or a dict with `score`.

    Other numbers of a dict are logged, NaN where an answer lacks one; whatever else it holds is kept as text.
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
