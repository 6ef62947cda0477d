"""Scorers by name: each gives one response a number, from its text and its label's, and maybe others to log."""

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
"""Kind of the plug-ins that provide scorers by their names."""

Scorer = Callable[[str, str], float | dict[str, float]]
"""Scores one response against its label, both without special tokens; beside `score` a dict has numbers to log."""
S = TypeVar("S", bound=Scorer)
_PACKAGE = "needed_package"
"""Attribute of a scorer that needs a package."""

# A number as people write it: commas between groups of three, a point; sign and dollar before it in either order.
_DIGITS = r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
# What follows must not make it another number: `3/4` is not 3, and `1.2.3` is not 1.2.
# Nothing is given back: in a long row of spaces each way to share them would be tried.
_STATED_NUMBER = re.compile(rf"\s*+(?:\\?\$)?+\s*+(?P<sign>[-+−]?+)\s*+(?:\\?\$)?+\s*+{_DIGITS}(?!\s*[/^]|[.,:]?[0-9])")
# In running text a minus is a sign only where nothing stands before it that it could be taken from: `10-3` ends in 3.
_ANY_NUMBER = re.compile(rf"(?P<sign>(?<![\w)])[-−](?=\\?\$?[0-9.]))?(?:\\?\$)?{_DIGITS}")


@dataclass(frozen=True)
class Package:
    """A package that a scorer imports when it is first called."""

    module: str
    """Import name."""
    name: str
    """Name of the package."""
    extra: str
    """Extra of scripts/setup.sh that installs it."""


def needs(package: Package) -> Callable[[S], S]:
    """Return a decorator that records the package which a scorer imports, so that it is checked before a run."""

    def record(scorer: S) -> S:
        setattr(scorer, _PACKAGE, package)
        return scorer

    return record


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


@needs(Package("math_verify", "math-verify", "math"))
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
}


def register_scorer(name: str, scorer: Scorer) -> None:
    """Make a scorer available under a name of its own; other processes must be able to import it."""
    if name in scorer_names():
        raise ValueError(f"there is a scorer named {name!r} already; choose another name")
    _SCORERS[name] = scorer


def scorer_names() -> list[str]:
    """List the names that `get_scorer` knows: the scorers here, the registered ones, and those of plug-ins."""
    return sorted({*_SCORERS, *names(KIND)})


def get_scorer(name: str) -> Scorer:
    """Return the scorer of a name.

    Raises:
        MissingPlugin: there is no such scorer.
        ValueError: a package that it needs is not installed.
    """
    try:
        scorer = _SCORERS.get(name) or _load(name)
    except MissingPlugin as error:
        known = ", ".join(scorer_names())
        raise MissingPlugin(
            f"there is no scorer {name!r}, and no plug-in provides it; set it to one of: {known}, or a .py file"
        ) from error
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
    """Name the module that a scorer imports when it is first called: whoever runs it can do so before that."""
    package: Package | None = getattr(scorer, _PACKAGE, None)
    return package and package.module


def default_scorer(source: str) -> str | None:
    """Name the scorer of data that bring one, by their source in `load_rows`; None where the parts do not bring one.

    Raises:
        ValueError: no plug-in draws the rows of a part whose name has a scheme.
    """
    drawn = [data_source(name.strip()) for name in source.split(",")]
    scorers = {None if part is None else part.scorer for part in drawn}
    return scorers.pop() if len(scorers) == 1 else None


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
