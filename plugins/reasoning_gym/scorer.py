"""The verifiers of reasoning-gym as one scorer. A label has all data that the verifier of its question needs.

Verifiers give partial scores for many answers, even for garbage, so only a full score counts.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from components.rewards.scorers import Package, needs

# Scores are floating-point sums, so a full score may be slightly below 1.
FULL_SCORE = 1.0 - 1e-9
ERROR_LOG = "reasoning_gym_error"
"""Metric that is 1 for an answer that its verifier could not process, and 0 for any other."""

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
"""Tasks whose verifier passes an answer to Python's eval, directly or through sympy."""
_FORMULA_NAMES = {
    *("Integral", "abs", "Abs", "sqrt", "exp", "log", "ln", "pi", "sin", "cos", "tan", "cot", "sec", "csc"),
    *("asin", "acos", "atan", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
}
"""The only names of more than one letter that an answer to these tasks may have."""

_TUPLE = "(tuple)"
_ITEMS = "(items)"
_WARNED: set[tuple[str, str]] = set()


def make_label(task: str, settings: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Return a question as JSON, with all data that its verifier may need.

    Args:
        task: name of the task.
        settings: settings that differ from the task's defaults.
        entry: entry of the task's data set: question, answer (may be None) and metadata.

    Raises:
        TypeError: the entry has values that JSON cannot represent.
    """
    return json.dumps({"task": task, "settings": _tagged(dict(settings)), "entry": _tagged(dict(entry))})


@needs(Package("reasoning_gym", "reasoning-gym", "tasks"))
def reasoning_gym_score(response: str, label: str) -> dict[str, float]:
    """Return 1.0 if the verifier of the task gives the answer its full score, and 0.0 otherwise.

    Args:
        response: any text. The last `<answer>...</answer>` in it is the answer. Without one, the answer is the last
            line that is not empty, or the whole response if the correct answer has several lines or is not known.
        label: result of `make_label`. An empty answer, and one that the verifier cannot process, get 0.0.

    Returns:
        `score`, and under `ERROR_LOG` 1.0 if the verifier could not process the answer.

    Raises:
        ValueError: the label was not made by `make_label`.
    """
    task, settings, entry = _read_label(label)
    right = entry["answer"]
    answer = _answer_in(response, has_several_lines=right is None or "\n" in right)
    # Before the verifier is created: a plan checks labels this way, and should not load the library for it.
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


def _answer_in(response: str, *, has_several_lines: bool) -> str:
    before, closed, _ = response.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    if closed and opened:
        return answer.strip()
    # Without tags: models often end with the bare answer.
    lines = response.strip().splitlines()
    if has_several_lines or not lines:
        return response.strip()
    return lines[-1].strip()


def _is_code(answer: str) -> bool:
    """Return True if an answer may contain more Python than a formula or a table.

    Names may only be single letters, names of formulas, and, for string_insertion, words of the letters A to E.
    Attributes are not allowed. Quotes and backslashes could spell any name. Non-ASCII letters are not allowed, because
    Python normalizes them to ASCII letters.
    """
    if not answer.isascii() or "__" in answer or set(answer) & set("'\"\\{}:;@"):
        return True
    if re.search(r"\.\s*[A-Za-z_]", answer):
        return True
    names = {name for name in re.findall(r"[A-Za-z_]\w*", answer) if not re.fullmatch(r"[A-Za-z_]|[A-E]+", name)}
    return bool(names - _FORMULA_NAMES)


def _read_label(label: str) -> tuple[str, str, dict[str, Any]]:
    """Return the task, its settings as JSON, and the entry of a label."""
    try:
        fields = json.loads(label, object_hook=_untagged)
        return fields["task"], json.dumps(_tagged(fields["settings"])), {**fields["entry"]}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the label {label[:80]!r} is none of reasoning-gym's; score prompts of reasoning_gym:<task> with the "
            "scorer reasoning_gym, and no others"
        ) from error


@cache
def _verifier(task: str, settings: str) -> Any:
    # Cached, because creating a verifier may take seconds: some tasks read a dictionary first.
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **json.loads(settings, object_hook=_untagged), seed=0, size=1)


def _warn(task: str, error: Exception) -> None:
    """Log a warning once for each kind of error. The metric `ERROR_LOG` counts all errors."""
    kind = (task, type(error).__name__)
    if kind not in _WARNED:
        _WARNED.add(kind)
        logging.getLogger(__name__).warning(
            "reasoning_gym:%s: the verifier could not take a response (%s: %.200s); such responses get 0", *kind, error
        )


def _tagged(value: Any) -> Any:
    """Mark the values that JSON would change: verifiers compare tuples, and look numbers up in dicts."""
    if isinstance(value, tuple):
        return {_TUPLE: [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _tagged(item) for key, item in value.items()}
        return {_ITEMS: [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    return value


def _untagged(value: dict[str, Any]) -> Any:
    if _TUPLE in value:
        return tuple(value[_TUPLE])
    if _ITEMS in value:
        return dict(value[_ITEMS])
    return value
