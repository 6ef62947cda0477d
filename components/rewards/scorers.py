"""Scorers by name: each gives one response a number, from its text and its label's, and maybe others to log."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable
from decimal import Decimal

from plugins.demo.tasks import TASKS, get_task
from plugins.reasoning_gym.scorer import reasoning_gym_score

TASK_PREFIX = "task:"
REASONING_GYM = "reasoning_gym"
REASONING_GYM_PREFIX = f"{REASONING_GYM}:"

Scorer = Callable[[str, str], float | dict[str, float]]
"""Scores one response against its label, both without special tokens; beside `score` a dict has numbers to log."""

# A number as people write it: commas between groups of three, a point; sign and dollar before it in either order.
_DIGITS = r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
# What follows must not make it another number: `3/4` is not 3, and `1.2.3` is not 1.2.
# Nothing is given back: in a long row of spaces each way to share them would be tried.
_STATED_NUMBER = re.compile(rf"\s*+(?:\\?\$)?+\s*+(?P<sign>[-+−]?+)\s*+(?:\\?\$)?+\s*+{_DIGITS}(?!\s*[/^]|[.,:]?[0-9])")
# In running text a minus is a sign only where nothing stands before it that it could be taken from: `10-3` ends in 3.
_ANY_NUMBER = re.compile(rf"(?P<sign>(?<![\w)])[-−](?=\\?\$?[0-9.]))?(?:\\?\$)?{_DIGITS}")


def exact_match(response: str, label: str) -> float:
    """Give 1.0 when the response is the label, but for white space at the ends."""
    return 1.0 if response.strip() == str(label).strip() else 0.0


def gsm8k(response: str, label: str) -> float:
    """Give 1.0 when the response states the label's number as `#### N`; the last such line counts.

    Args:
        response: any text.
        label: a solution of GSM8K, which ends in `#### N`, or the number alone.
    """
    wanted = _label_value(label)
    _, stated, answer = response.rpartition("####")
    found = _STATED_NUMBER.match(answer) if stated else None
    return 1.0 if found and _value(found) == wanted else 0.0


def gsm8k_flexible(response: str, label: str) -> float:
    """Give 1.0 when the last number in the response, wherever it stands, is the label's; the label as in `gsm8k`."""
    wanted = _label_value(label)
    found = list(_ANY_NUMBER.finditer(response))
    return 1.0 if found and _value(found[-1]) == wanted else 0.0


def math_answer(response: str, label: str) -> float:
    r"""Give 1.0 when the answer found in the response equals the label's as mathematics, by math-verify.

    Args:
        response: any text; the last \boxed{} counts before other formulas, these before bare numbers.
        label: an answer in LaTeX or plain, or a solution with \boxed{}.
    """
    from math_verify import parse, verify

    # It warns that without its timeouts somebody else has to end what hangs: whoever runs a scorer does.
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    # Without marks around it, only numbers would be found in a label such as \sqrt{2}.
    marked = label if "$" in label or "\\boxed" in label else f"\\boxed{{{label}}}"
    gold = parse(marked, parsing_timeout=0)
    if not gold:
        raise ValueError(f"the label {label!r} holds no mathematical answer; set the label key to the field that does")
    return 1.0 if verify(gold, parse(response, parsing_timeout=0), timeout_seconds=0) else 0.0


_SCORERS: dict[str, Scorer] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "math": math_answer,
    REASONING_GYM: reasoning_gym_score,
}
_PACKAGES = {"math": ("math_verify", "math-verify", "math"), REASONING_GYM: ("reasoning_gym", "reasoning-gym", "tasks")}
"""The module, the package and the extra that a scorer needs."""


def register_scorer(name: str, scorer: Scorer) -> None:
    """Make a scorer available under a name of its own; other processes must be able to import it."""
    if name in _SCORERS or name in TASKS:
        raise ValueError(f"there is a scorer named {name!r} already; choose another name")
    _SCORERS[name] = scorer


def scorer_names() -> list[str]:
    """List the names that `get_scorer` knows: the tasks and the registered scorers."""
    return sorted({*_SCORERS, *TASKS})


def get_scorer(name: str) -> Scorer:
    """Look up the scorer of a task, or a registered one."""
    if name in TASKS:
        return get_task(name).graded
    if name not in _SCORERS:
        raise ValueError(f"there is no scorer {name!r}; set it to one of: {', '.join(scorer_names())}, or a .py file")
    if name in _PACKAGES:
        module, package, extra = _PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            raise ValueError(
                f"the scorer {name!r} needs the package {package}, which is not installed; run: "
                f"bash scripts/setup.sh recipes {extra}"
            )
    return _SCORERS[name]


def module_of(name: str) -> str | None:
    """Name the module that a scorer imports when it is first called: whoever runs it can do so before that."""
    return _PACKAGES[name][0] if name in _PACKAGES else None


def default_scorer(source: str) -> str | None:
    """Name the scorer of data that bring one, by their source in `load_rows`; None where the parts do not bring one."""
    found: set[str | None] = set()
    for name in map(str.strip, source.split(",")):
        of_task = name.removeprefix(TASK_PREFIX) if name.startswith(TASK_PREFIX) else None
        found.add(REASONING_GYM if name.startswith(REASONING_GYM_PREFIX) else of_task)
    return found.pop() if len(found) == 1 else None


def _value(found: re.Match[str]) -> Decimal:
    # Decimal, and not float: every digit counts, however many there are.
    number = Decimal(found["digits"].replace(",", ""))
    return number.copy_negate() if found["sign"] in ("-", "−") else number


def _label_value(label: str) -> Decimal:
    answer = label.rpartition("####")[2]
    found = _STATED_NUMBER.match(answer)
    if found is None or answer[found.end() :].strip(" \t\r\n.%$"):
        raise ValueError(
            f"the label {label[-80:]!r} is neither a number nor a solution that ends in '#### N'; set the label key "
            "to the field that is"
        )
    return _value(found)
