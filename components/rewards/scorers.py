"""Scorers by name. A scorer returns the score of a response from its text and its label, and further numbers to log."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
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


_SCORERS: dict[str, Scorer] = {"exact_match": exact_match}


def register_scorer(name: str, scorer: Scorer) -> None:
    """Register a scorer under a new name. Other processes must be able to import it.

    Raises:
        ValueError: the name exists already.
    """
    if name in scorer_names():
        raise ValueError(f"there is a scorer named {name!r} already; choose another name")
    _SCORERS[name] = scorer


def scorer_names() -> list[str]:
    """Return the sorted names of all scorers: `exact_match`, registered ones, and those of plug-ins."""
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
    # A mixture of sources with different scorers has no scorer that fits all of its labels.
    if len(scorers) > 1:
        return None
    return scorers.pop()
