"""Reward functions in verl's signature, selected by the data source of a row, or from a user's file.

    compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> number | {"score": number, ...}

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from components.data.sources import KIND as SOURCES
from components.registry import load, names
from components.rewards.base import FUNCTIONS, check_reward
from components.rewards.code import RewardCode, code_of, scored
from components.rewards.scorers import get_scorer, scorer_names

ScoreFunction = Callable[..., Any]
"""Function in verl's signature."""

SCORER_OF = {
    **dict.fromkeys(("openai/gsm8k", "Rowan/hellaswag"), "gsm8k"),
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"),
    **dict.fromkeys(("math_dapo", "math_dapo_reasoning", "aime*", "numina_*"), "math"),
}
"""Data source -> scorer, where their names differ. A `*` at the end matches any rest of the name."""
KIND = "score function"
"""Kind of plug-in in the registry. It maps a data source to a function in verl's signature."""


def default_functions() -> dict[str, ScoreFunction]:
    """Return the built-in functions and those of plug-ins by data source.

    The name of a scorer is a data source too. So is `<scheme>:*`, if a scorer has the name of the scheme of generated
    rows.
    """
    scorers = scorer_names()
    # verl's names of data sources win over scorers with the same name.
    scorer_of = {name: name for name in scorers} | SCORER_OF
    scorer_of |= {f"{scheme}:*": scheme for scheme in names(SOURCES) if scheme in scorers}
    functions: dict[str, ScoreFunction] = {source: partial(by_scorer, scorer) for source, scorer in scorer_of.items()}
    return functions | {source: load(KIND, source) for source in names(KIND)}


def by_scorer(
    scorer: str,
    data_source: str,  # noqa: ARG001 - part of the signature
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001 - as above
) -> float | dict[str, float]:
    """Call a scorer by its name, with the arguments of verl's signature."""
    return scored(get_scorer(scorer), solution_str, ground_truth)


def find_function(functions: Mapping[str, ScoreFunction], source: str) -> ScoreFunction | None:
    """Return the function of a data source by its exact name, or by a pattern with `*` at its end; None without one."""
    if source in functions:
        return functions[source]
    patterns = (name for name in functions if name.endswith("*") and source.startswith(name[:-1]))
    return next((functions[name] for name in patterns), None)


@dataclass(frozen=True, kw_only=True)
class ScoreCode:
    """Functions that score responses: a function of a file, or one for each data source."""

    path: str | None = None
    """Python file with the function. None uses `functions`."""
    name: str = "compute_score"
    """Name of the function in the file. It may be async."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the function."""
    lists: bool = False
    """True if the file's function takes all responses of a batch at once, as the lists data_sources, solution_strs,
    ground_truths and extra_infos. It returns a number or a dict for each."""
    functions: Mapping[str, ScoreFunction] = field(default_factory=default_functions)
    """Functions by data source, defined at the top level of modules because they run in other processes."""
    optional: bool = False
    """Score responses for data sources without a function as 0. False counts them as failed."""

    @property
    def spec(self) -> str:
        """The file's function as a reward specification."""
        return f"{self.path}:{self.name}"

    def reward_code(self) -> RewardCode:
        """Return the code that runs in child processes."""
        if self.path is not None:
            return code_of(self.spec, self.kwargs, of_one=not self.lists)
        by_names = load(FUNCTIONS, "by names", "the reward function")
        loader = partial(by_names, partial(_by_source, self.functions, self.optional))
        return RewardCode(source="the reward function", load=loader, of_one=True)

    def check(self) -> None:
        """Check that the file exists and defines the function, without running it.

        Raises:
            ValueError: it does not.
        """
        if self.path is not None:
            check_reward(self.spec)

    def knows(self, source: str) -> bool:
        """Return True if there is a function for responses to prompts of this data source."""
        return self.path is not None or find_function(self.functions, source) is not None

    def unknown(self, sources: Iterable[str]) -> list[str]:
        """Return the sorted data sources without a function."""
        return sorted({source for source in sources if not self.knows(source)})

    def check_labels(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Check that the functions can read the first label of each data source. Functions of files are not called.

        Raises:
            ValueError: a function raises an error, or needs a package that is not installed.
        """
        if self.path is not None:
            return
        # Reversed, so that the first row of each data source is the one that remains in the dict.
        first_rows = {row["datasource"]: row for row in reversed(rows)}
        for source, row in first_rows.items():
            if (function := find_function(self.functions, source)) is not None:
                try:
                    function(source, "", row["label"], row.get("extra_info"))
                except ValueError as error:
                    raise ValueError(f"data source {source!r}: {error}") from error
                except Exception as error:  # a user's function may raise any exception, some without a message
                    raise ValueError(f"data source {source!r}: {error!r}") from error


def _by_source(
    functions: Mapping[str, ScoreFunction],
    optional: bool,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
) -> Any:
    function = find_function(functions, data_source)
    if function is not None:
        return function(data_source, solution_str, ground_truth, extra_info)
    if not optional:
        raise ValueError(f"there is no reward function for data source {data_source!r}")
    return 0.0
