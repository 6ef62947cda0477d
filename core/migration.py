"""Names of DLRover and verl that are different in core, listed in `migration.csv`."""

import csv
import functools
from pathlib import Path
from typing import NamedTuple


class Replacement(NamedTuple):
    """Replacement of one name: core's name for the same object (`alias`, or empty), and advice in words (`advice`)."""

    alias: str
    advice: str


@functools.cache
def replacements() -> dict[tuple[str, str], Replacement]:
    """Return all replacements, keyed by (place of use, name)."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as rows:
        return {(row["where"], row["name"]): Replacement(row["alias"], row["advice"]) for row in csv.DictReader(rows)}


def alias_of(where: str, name: str, owner: str, error: type[Exception]) -> str:
    """Return core's name for the same object, or an empty string if the name is not in the table.

    Args:
        where: the place of use, the first column of `migration.csv`.
        name: the name in DLRover or verl.
        owner: the object that lacks the name, for the message.
        error: the exception class to raise.

    Raises:
        Exception: an `error` whose message gives the replacement, if core has no equivalent object.
    """
    replacement = replacements().get((where, name), Replacement("", ""))
    if replacement.advice and not replacement.alias:
        raise error(f"{owner} has no {name}; {replacement.advice}")
    return replacement.alias
