"""Scorers by name. A scorer returns the score of a response from its text and its label, and further numbers to log."""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeVar

from components.data.sources import data_source
from components.registry import MissingPlugin, load, names

KIND = "scorer"
"""Kind of plug-in in the registry. It maps a name to a scorer."""

Scorer = Callable[[str, str], float | dict[str, float]]
"""Function of a response and its label, both without special tokens. It returns the score, or a dict with `score` and
further numbers to log."""
S = TypeVar("S", bound=Scorer)
_PACKAGE = "needed_package"
"""Attribute that is set on a scorer that needs a package."""

# A number as people write it: commas between groups of three, a decimal point; sign and dollar in either order.
_DIGITS = r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
# The text after it must not make it another number: `3/4` is not 3, and `1.2.3` is not 1.2.
# Possessive quantifiers, because backtracking over a long run of spaces would take quadratic time or more.
_STATED_NUMBER = re.compile(rf"\s*+(?:\\?\$)?+\s*+(?P<sign>[-+−]?+)\s*+(?:\\?\$)?+\s*+{_DIGITS}(?!\s*[/^]|[.,:]?[0-9])")
# In running text a minus is a sign only if no operand of a subtraction is before it: `10-3` ends in 3.
_ANY_NUMBER = re.compile(rf"(?P<sign>(?<![\w)])[-−](?=\\?\$?[0-9.]))?(?:\\?\$)?{_DIGITS}")


@dataclass(frozen=True)
class Package:
    """Package that a scorer imports at its first call."""

    module: str
    """Import name."""
    name: str
    """Name of the package."""
    extra: str
    """Extra of scripts/setup.sh that installs it."""


def needs(package: Package) -> Callable[[S], S]:
    """Return a decorator that records the package of a scorer, so that it can be checked before a run."""

    def record(scorer: S) -> S:
        setattr(scorer, _PACKAGE, package)
        return scorer

    return record


def exact_match(response: str, label: str) -> float:
    """Return 1.0 if the response equals the label, up to white space at both ends."""
    return float(response.strip() == str(label).strip())


def gsm8k(response: str, label: str) -> float:
    """Return 1.0 if the number after the last `####` in the response equals the label's number.

    Args:
        response: any text.
        label: a solution of GSM8K, which ends in `#### N`, or only the number.

    Raises:
        ValueError: the label has no number.
    """
    label_value = _label_value(label)
    _, separator, answer = response.rpartition("####")
    if not separator:
        return 0.0
    match = _STATED_NUMBER.match(answer)
    return float(match is not None and _value(match) == label_value)


def gsm8k_flexible(response: str, label: str) -> float:
    """Return 1.0 if the last number anywhere in the response equals the label's number.

    Args:
        response: any text.
        label: as in `gsm8k`.

    Raises:
        ValueError: the label has no number.
    """
    label_value = _label_value(label)
    matches = list(_ANY_NUMBER.finditer(response))
    return float(bool(matches) and _value(matches[-1]) == label_value)


@needs(Package("math_verify", "math-verify", "math"))
def math_answer(response: str, label: str) -> float:
    r"""Return 1.0 if the answer in the response is mathematically equal to the label's, as decided by math-verify.

    Args:
        response: any text. The last \boxed{} takes precedence over other formulas, and these over plain numbers.
        label: an answer in LaTeX or plain text, or a solution with \boxed{}.

    Raises:
        ValueError: the label has no mathematical answer.
    """
    from math_verify import parse, verify

    # math-verify warns that it has no timeout of its own here. The process that runs a scorer has one.
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    # Without a delimiter, math-verify would read only numbers from a label such as \sqrt{2}.
    marked_label = label if "$" in label or "\\boxed" in label else f"\\boxed{{{label}}}"
    gold = parse(marked_label, parsing_timeout=0)
    if not gold:
        raise ValueError(f"the label {label!r} holds no mathematical answer; set the label key to the field that does")
    return float(bool(verify(gold, parse(response, parsing_timeout=0), timeout_seconds=0)))


_SCORERS: dict[str, Scorer] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "math": math_answer,
}


def register_scorer(name: str, scorer: Scorer) -> None:
    """Register a scorer under a new name. Other processes must be able to import it.

    Raises:
        ValueError: the name exists already.
    """
    if name in scorer_names():
        raise ValueError(f"there is a scorer named {name!r} already; choose another name")
    _SCORERS[name] = scorer


def scorer_names() -> list[str]:
    """Return the sorted names of all scorers: built-in, registered, and of plug-ins."""
    return sorted({*_SCORERS, *names(KIND)})


def get_scorer(name: str) -> Scorer:
    """Return the scorer of a name.

    Raises:
        MissingPlugin: the scorer does not exist.
        ValueError: a package that it needs is not installed.
    """
    try:
        scorer = _SCORERS.get(name) or _load(name)
    except MissingPlugin as error:
        known = ", ".join(scorer_names())
        raise MissingPlugin(
            f"there is no scorer {name!r}, and no plug-in provides it; set it to one of: {known}, or a .py file"
        ) from error
    # Checked here, because a missing package would otherwise fail in a child process with the first responses.
    package: Package | None = getattr(scorer, _PACKAGE, None)
    if package is not None and importlib.util.find_spec(package.module) is None:
        raise ValueError(
            f"the scorer {name!r} needs the package {package.name}, which is not installed; run: "
            f"bash scripts/setup.sh recipes {package.extra}"
        )
    return scorer


@functools.cache
def _load(name: str) -> Scorer:
    return load(KIND, name)


def module_of(scorer: Scorer) -> str | None:
    """Return the module that a scorer imports at its first call, so that it can be imported before, or None."""
    package: Package | None = getattr(scorer, _PACKAGE, None)
    return package and package.module


def default_scorer(source: str) -> str | None:
    """Return the scorer of a data source of `load_rows`, if all its comma-separated parts have the same one, or None.

    Raises:
        ValueError: no plug-in generates the rows of a part whose name has a scheme.
    """
    scorers: set[str | None] = set()
    for name in source.split(","):
        generator = data_source(name.strip())
        scorers.add(generator and generator.scorer)
    return None if len(scorers) > 1 else scorers.pop()


def _value(match: re.Match[str]) -> Decimal:
    # Decimal instead of float, which would round long numbers so that different ones are equal.
    number = Decimal(match["digits"].replace(",", ""))
    return number.copy_negate() if match["sign"] in ("-", "−") else number


def _label_value(label: str) -> Decimal:
    answer = label.rpartition("####")[2]
    match = _STATED_NUMBER.match(answer)
    if match is None or answer[match.end() :].strip(" \t\r\n.%$"):
        raise ValueError(
            f"the label {label[-80:]!r} is neither a number nor a solution that ends in '#### N'; set data.label_key "
            "to the column with the answers"
        )
    return _value(match)
