"""Wrapper that observes a function's arguments and results in the process that runs it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from components.rewards.base import read_columns
from components.rewards.scorers import Scorer

# The process returns the name of an exception class, followed by a colon.


class Refused(Exception):
    """Raised when the function rejects its arguments with a ValueError."""


class ChangedArguments(Exception):
    """Raised when the function has changed its arguments."""


class ScoreOutOfRange(Exception):
    """Raised when the function returns 'scores' outside of 0 to 1."""


class Watched:
    """Wrapper with the signature of a function. It raises one of the exceptions above, or those of the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # Copies the signature, so that callers pass the arguments that they would pass to the function.
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        before = copy.deepcopy((arguments, named))
        try:
            result = self._function(*arguments, **named)
        except ValueError as error:
            raise Refused(str(error)) from error
        names = (*("queries", "prompts", "labels")[: len(arguments)], *named)
        values_before = [*before[0], *before[1].values()]
        values = [*arguments, *named.values()]
        for name, old, new in zip(names, values_before, values):
            # TRL's loggers are functions, whose copies compare as different.
            if not callable(new) and new != old:
                raise ChangedArguments(f"{name} were {old!r:.100}, and then {new!r:.100}")
        if isinstance(result, Mapping) and result.get("scores") is not None:
            # Raises the error of training for a result that cannot be read.
            for score in read_columns(result, len(values[0])).scores:
                if not 0 <= score <= 1:
                    raise ScoreOutOfRange(f"it returned the score {score:g}")
        return result


def watched_scorer(scorer: Scorer) -> Callable[..., list[Any]]:
    """Return a watched reward function that calls a scorer with labels as text."""
    watched = Watched(scorer)

    def reward_func(
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        responses: Sequence[str],
    ) -> list[Any]:
        return [watched(response, str(label)) for response, label in zip(responses, labels)]

    return reward_func
