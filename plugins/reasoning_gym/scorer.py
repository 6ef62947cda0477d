"""The verifiers of reasoning-gym as one scorer; a label holds all that the one of its question needs.

A verifier gives part of the score for all sorts of answers, garbage included, so only a full score counts.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from components.rewards.scorers import Package, needs

FULL_SCORE = 1.0 - 1e-9
ERROR_LOG = "reasoning_gym_error"
"""What is logged: 1 for an answer that its verifier could not take, 0 for any other."""

RUNS_ANSWERS = {
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}
"""Tasks whose verifier hands an answer to Python's eval, itself or through sympy."""
_OF_FORMULAS = {
    *("Integral", "abs", "Abs", "sqrt", "exp", "log", "ln", "pi", "sin", "cos", "tan", "cot", "sec", "csc"),
    *("asin", "acos", "atan", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
}
"""The only words of more than one letter that such an answer may have."""

_TUPLE, _ITEMS = "(tuple)", "(items)"
_WARNED: set[tuple[str, str]] = set()


def make_label(task: str, settings: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Write a question down as JSON, with all that its verifier may ask for.

    Args:
        task: its name.
        settings: of the task, where they are not its own.
        entry: what the task gave: question, answer (may be None) and metadata.

    Raises:
        TypeError: the entry holds what JSON cannot.
    """
    return json.dumps({"task": task, "settings": _tagged(dict(settings)), "entry": _tagged(dict(entry))})


@needs(Package("reasoning_gym", "reasoning-gym", "tasks"))
def reasoning_gym_score(response: str, label: str) -> dict[str, float]:
    """Give 1.0 when the task's own verifier gives the answer in the response its full score, and 0.0 otherwise.

    Args:
        response: any text. The last `<answer>...</answer>` in it is the answer; without one, the last line that is
            not empty is, or the whole response where the right answer has several lines or is not known.
        label: what `make_label` made. An answer that its verifier cannot take gets 0.0, and an empty one as well.

    Returns:
        `score`, and under `ERROR_LOG` whether the verifier could not take the answer.
    """
    task, settings, entry = _read_label(label)
    right = entry["answer"]
    answer = _answer_in(response, many_lines=right is None or "\n" in right)
    # Before the verifier is made: a plan checks a label this way, and need not load the library for it.
    if not answer:
        return {"score": 0.0, ERROR_LOG: 0.0}
    if task in RUNS_ANSWERS and _is_code(answer):
        return {"score": 0.0, ERROR_LOG: 1.0}
    verifier = _verifier(task, settings)
    try:
        return {"score": float(float(verifier.score_answer(answer, entry)) >= FULL_SCORE), ERROR_LOG: 0.0}
    except Exception as error:  # noqa: BLE001 - a verifier may raise anything at what a policy wrote
        _warn(task, error)
        return {"score": 0.0, ERROR_LOG: 1.0}


def _answer_in(response: str, *, many_lines: bool) -> str:
    before, closed, _ = response.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    if closed and opened:
        return answer.strip()
    lines = response.strip().splitlines()
    return response.strip() if many_lines or not lines else lines[-1].strip()


def _is_code(answer: str) -> bool:
    """Whether an answer says more to Python than a formula or a table does.

    Only single letters, words of formulas and, for string_insertion, words of its letters A to E may be named, and
    nothing of what they name. Quotes and backslashes can spell any name, and Python reads other alphabets' letters as
    the plain ones.
    """
    if not answer.isascii() or "__" in answer or set(answer) & set("'\"\\{}:;@"):
        return True
    if re.search(r"\.\s*[A-Za-z_]", answer):
        return True
    words = {word for word in re.findall(r"[A-Za-z_]\w*", answer) if not re.fullmatch(r"[A-Za-z_]|[A-E]+", word)}
    return bool(words - _OF_FORMULAS)


def _read_label(label: str) -> tuple[str, str, dict[str, Any]]:
    """The task, its settings as one text, and the entry."""
    try:
        found = json.loads(label, object_hook=_untagged)
        return found["task"], json.dumps(_tagged(found["settings"])), {**found["entry"]}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the label {label[:80]!r} is none of reasoning-gym's; score prompts of reasoning_gym:<task> with the "
            "scorer reasoning_gym, and no others"
        ) from error


@cache
def _verifier(task: str, settings: str) -> Any:
    # Making one may take seconds: some tasks read a dictionary first.
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(settings, object_hook=_untagged), seed=0, size=1)


def _warn(task: str, error: Exception) -> None:
    """Say it once for each kind of error: all of them are counted."""
    kind = (task, type(error).__name__)
    if kind not in _WARNED:
        _WARNED.add(kind)
        logging.getLogger(__name__).warning(
            "reasoning_gym:%s: the verifier could not take a response (%s: %.200s); such responses get 0", *kind, error
        )


def _tagged(value: Any) -> Any:
    """Mark what JSON would change: verifiers compare tuples, and look numbers up in dicts."""
    if isinstance(value, tuple):
        return {_TUPLE: [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _tagged(item) for key, item in value.items()}
        return {_ITEMS: [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    return value


def _untagged(found: dict[str, Any]) -> Any:
    if _TUPLE in found:
        return tuple(found[_TUPLE])
    if _ITEMS in found:
        return dict(found[_ITEMS])
    return found
