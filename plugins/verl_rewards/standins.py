"""Replacements for the reward functions of verl that a user's reward file imports, for machines without verl.

Names and signatures are verl's. The built-in functions of the recipe compute the scores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from components.rewards.code import RewardCode
from components.rewards.score_functions import ScoreCode, default_functions, find_function

SEARCHED = 300
"""Number of characters at the end of a response in which the result of a GSM8K problem is searched."""
_RESULT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def with_standins(code: ScoreCode) -> RewardCode:
    """Return the code that runs in child processes. A user's file may import verl's reward functions there."""
    made = code.reward_code()
    if code.path is None:
        return made
    return replace(made, load=partial(_load, made.load))


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> Any:
    """Return the score of the built-in function of a data source.

    Raises:
        NotImplementedError: there is none, as in verl.
    """
    function = find_function(default_functions(), data_source)
    if function is None:
        raise NotImplementedError(f"there is no reward function for data_source={data_source!r}")
    return function(data_source, solution_str, ground_truth, extra_info)


def extract_gsm8k(solution_str: str, method: str = "strict") -> str | None:
    """Return the result of a GSM8K response without commas: the last one after `####`, or with method=flexible the last
    number.
    """
    pattern = _RESULT if method == "strict" else _NUMBER
    results = [text for text in pattern.findall(solution_str[-SEARCHED:]) if text not in ("", ".")]
    if not results:
        return None
    return results[-1].replace(",", "").replace("$", "")


def gsm8k_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` for the right result, `format_score` for another one, and 0 without a result."""
    result = extract_gsm8k(solution_str, method)
    if result is None:
        return 0.0
    if result == ground_truth:
        return score
    return format_score


def math_score(solution_str: str, ground_truth: str, *_: Any, **__: Any) -> float:
    """Return 1 if the answer in the response equals the ground truth."""
    return float(default_compute_score("lighteval/MATH", solution_str, ground_truth))


def dapo_score(solution_str: str, ground_truth: str, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the score of DAPO's maths, 1 or -1, with the accuracy and the answer that was found."""
    is_right = math_score(solution_str, ground_truth) > 0
    boxed = last_boxed_only_string(solution_str)
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": boxed and remove_boxed(boxed)}


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last `\boxed{...}` or `\fbox{...}` of a text, or None without one."""
    start = max(string.rfind("\\boxed{"), string.rfind("\\fbox{"))
    depth = 0
    for end in range(max(start, 0), len(string)):
        depth += {"{": 1, "}": -1}.get(string[end], 0)
        if start >= 0 and depth == 0 and string[end] == "}":
            return string[start : end + 1]
    return None


def remove_boxed(s: str) -> str:
    r"""Return the content of `\boxed{...}` or `\fbox{...}`."""
    return s[s.index("{") + 1 : s.rindex("}")]


_BOXED = {"last_boxed_only_string": last_boxed_only_string, "remove_boxed": remove_boxed}
_SCORE = "verl.utils.reward_score"
MODULES: Mapping[str, Mapping[str, Any]] = {
    _SCORE: {"default_compute_score": default_compute_score, "_default_compute_score": default_compute_score},
    f"{_SCORE}.gsm8k": {"compute_score": gsm8k_score, "extract_solution": extract_gsm8k},
    f"{_SCORE}.math": {"compute_score": math_score, **_BOXED},
    f"{_SCORE}.math_reward": {"compute_score": math_score, **_BOXED},
    f"{_SCORE}.math_verify": {"compute_score": math_score},
    f"{_SCORE}.math_dapo": {"compute_score": dapo_score, **_BOXED},
}
"""Modules of verl -> the names in them."""


# The rest of this module runs in a child process.


def _load(load: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    from agents.verl_tools import provide_verl

    provide_verl(MODULES)
    return load()
