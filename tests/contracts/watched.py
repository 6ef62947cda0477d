"""Looks over a function's shoulder in the process that runs it, where alone can be seen what it does there."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from components.rewards.base import read_columns
from components.rewards.scorers import Scorer

# Their names are what comes back from the process, before a colon.


class Refused(Exception):
    """The function raised ValueError: it says that it cannot use what it was given."""


class ChangedArguments(Exception):
    """The function left its arguments other than it found them."""


class ScoreOutOfRange(Exception):
    """The function gave 'scores', and not all are from 0 to 1."""


class Watched:
    """A function with the signature of another, which it calls. It raises one of the above, or what that raises."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # Whoever asks for the signature gets the function's, and so passes what it would pass to the function.
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        before = copy.deepcopy((arguments, named))
        try:
            result = self._function(*arguments, **named)
        except ValueError as error:
            raise Refused(str(error)) from error
        names = (*("queries", "prompts", "labels")[: len(arguments)], *named)
        then, now = ([*positional, *named.values()] for positional, named in (before, (arguments, named)))
        for name, old, new in zip(names, then, now):
            # TRL's loggers are functions: their copies differ, and they are there to be called.
            if not callable(new) and new != old:
                raise ChangedArguments(f"{name} were {old!r:.100}, and then {new!r:.100}")
        if isinstance(result, Mapping) and result.get("scores") is not None:
            # Of what cannot be read, whoever reads the result says why.
            given = [*arguments, *named.values()]
            for score in read_columns(result, len(given[0])).scores:
                if not 0 <= score <= 1:
                    raise ScoreOutOfRange(f"it gave the score {score:g}")
        return result


def watched_scorer(scorer: Scorer) -> Callable[..., list[Any]]:
    """Make a reward function of a scorer, which sees every label as text."""
    watched = Watched(scorer)

    def reward_func(
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        responses: Sequence[str],
    ) -> list[Any]:
        return [watched(response, str(label)) for response, label in zip(responses, labels)]

    return reward_func
