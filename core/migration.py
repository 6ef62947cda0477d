"""Names of DLRover and verl that core spells differently, as `migration.csv` lists them."""

import csv
import functools
from pathlib import Path
from typing import NamedTuple


class Replacement(NamedTuple):
    """A replacement of one name: `alias` is the same thing under core's name, or empty; `here` says what to write."""

    alias: str
    here: str


@functools.cache
def replacements() -> dict[tuple[str, str], Replacement]:
    """All replacements, by where the name is used and the name."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as rows:
        return {(row["where"], row["name"]): Replacement(row["alias"], row["here"]) for row in csv.DictReader(rows)}


def alias_of(where: str, name: str, owner: str, error: type[Exception]) -> str:
    """Core's name of the same thing; an empty string if the name is not in the table.

    Raises:
        Exception: an `error` whose message says what to write, if nothing in core is the same thing.
    """
    known = replacements().get((where, name))
    if known is not None and not known.alias:
        raise error(f"{owner} has no {name}; {known.here}")
    return known.alias if known else ""
