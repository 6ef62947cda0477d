"""Reward functions in verl's signature, by the data source of a row, or from a user's file.

    compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> number | {"score": number, ...}

B responses. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from components.data.sources import KIND as SOURCES
from components.registry import load, names
from components.rewards.base import check_reward
from components.rewards.functions import RewardCode, by_names, code_of, scored
from components.rewards.scorers import get_scorer, scorer_names

ScoreFunction = Callable[..., Any]

SCORER_OF = {
    **dict.fromkeys(("openai/gsm8k", "Rowan/hellaswag"), "gsm8k"),
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"),
    **dict.fromkeys(("math_dapo", "math_dapo_reasoning", "aime*", "numina_*"), "math"),
}
"""The scorers of data sources that are not called as they are. A `*` stands for any end of a name."""
KIND = "score function"
"""Kind of the plug-ins that provide functions in verl's signature by the data sources of rows."""


def default_functions() -> dict[str, ScoreFunction]:
    """The built-in functions and those of plug-ins by data source. A scorer's own name is one as well, and
    `<scheme>:*` where a scorer has the name of the scheme that draws rows.
    """
    scorers = scorer_names()
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
    """A scorer by its name, in verl's signature."""
    return scored(get_scorer(scorer), solution_str, ground_truth)


def find_function(functions: Mapping[str, ScoreFunction], source: str) -> ScoreFunction | None:
    """The function of a data source, or the one whose name ends in a `*` and begins as the data source does."""
    if source in functions:
        return functions[source]
    begins = (name for name in functions if name.endswith("*") and source.startswith(name[:-1]))
    return next((functions[name] for name in begins), None)


@dataclass(frozen=True, kw_only=True)
class ScoreCode:
    """What scores responses: a function of a file, or one for each data source."""

    path: str | None = None
    """A Python file; None: `functions` are asked."""
    name: str = "compute_score"
    """The file's function; it may be async."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of it."""
    lists: bool = False
    """The file's function takes all responses of a batch at once, as lists: data_sources, solution_strs, ground_truths,
    extra_infos; it returns one number or dict for each."""
    functions: Mapping[str, ScoreFunction] = field(default_factory=default_functions)
    """By data source; from the top level of modules, as they run in other processes."""
    optional: bool = False
    """A response to a prompt of a data source without a function scores 0; otherwise it has failed, without a score."""

    @property
    def spec(self) -> str:
        """The file's function, as a reward is called."""
        return f"{self.path}:{self.name}"

    def reward_code(self) -> RewardCode:
        """The function, to be run in processes of its own."""
        if self.path is not None:
            return code_of(self.spec, self.kwargs, of_one=not self.lists)
        load = partial(by_names, partial(_by_source, self.functions, self.optional))
        return RewardCode(source="the reward function", load=load, of_one=True)

    def check(self) -> None:
        """Refuse a file that is not there or lacks the function, without running it."""
        if self.path is not None:
            check_reward(self.spec)

    def knows(self, source: str) -> bool:
        """Whether there is a function for responses to prompts of this data source."""
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
                except Exception as error:  # the functions may be a user's
                    reason = str(error) if isinstance(error, ValueError) else repr(error)
                    raise ValueError(f"data source {source!r}: {reason}") from error


def _by_source(
    functions: Mapping[str, ScoreFunction],
    optional: bool,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
) -> Any:
    function = find_function(functions, data_source)
    if function is None and not optional:
        raise ValueError(f"there is no reward function for data source {data_source!r}")
    return 0.0 if function is None else function(data_source, solution_str, ground_truth, extra_info)
