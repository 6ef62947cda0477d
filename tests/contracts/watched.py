"""Looks over a function's shoulder in the process that runs it, where alone can be seen what it does there."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from components.data.rewards import read_columns

Watch = Literal["arguments", "scores", "refusals"]


class Refused(Exception):
    """The function raised ValueError: it says that it cannot use what it was given."""


class Watched:
    """A function with the signature of another, which it calls.

    watch: what to look at. "arguments": whether they are afterwards what they were. "scores": whether those that were
    given are from 0 to 1. "refusals": whether ValueError came from the function, or from reading its result.
    """

    def __init__(self, function: Callable[..., Any], watch: Watch) -> None:
        # Whoever asks for the signature gets the function's, and so passes what it would pass to the function.
        functools.update_wrapper(self, function)
        self._function = function
        self._watch = watch

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        before = copy.deepcopy((arguments, named))
        try:
            result = self._function(*arguments, **named)
        except ValueError as error:
            if self._watch == "refusals":
                raise Refused(str(error)) from error
            raise
        if self._watch == "arguments" and (arguments, named) != before:
            columns = [*zip(("queries", "prompts", "labels"), arguments, before[0])]
            columns += [(name, now, before[1][name]) for name, now in named.items()]
            changed = next((name, old, now) for name, now, old in columns if now != old)
            raise RuntimeError(f"changed its argument {changed[0]} from {changed[1]!r:.80} to {changed[2]!r:.80}")
        if self._watch == "scores" and isinstance(result, Mapping) and result.get("scores") is not None:
            for score in read_columns(result, len(arguments[0])).scores:
                if not 0 <= score <= 1:
                    raise RuntimeError(f"gave the score {score:g}")
        return result
