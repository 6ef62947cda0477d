"""The registry of metrics: what each name means, in which unit, which way is better, and who watches it.

The entries are rows of metrics.csv. docs/metrics.md is made of them, the report groups its curves by them, and tests
hold every metric that a recipe writes to them. What a person adds in a copy of a recipe need not be here.
"""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Row = Literal["better", "healthy", "says", "fast"]
"""Which part of the report's curves a metric is in: scores and losses, the update, rollouts, speed and memory."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, or one family of them; a row of metrics.csv."""

    name: str
    """As it is logged; `<word>` stands for any text: `eval/<source>_pass<n>`."""
    row: Row
    meaning: str
    """In one sentence."""
    group: str = ""
    """Common prefix of the names of the group; empty for verl's names, whose prefixes differ."""
    unit: str = ""
    """nats, tokens, s, share, ...; empty for a plain number."""
    better: Literal["higher", "lower", ""] = ""
    """The good direction, where there is one."""
    alarm: str = ""
    """The alarms that watch it, by their names in alarms.py, with commas between."""
    same_as: str = ""
    """Our name for the same quantity, where another system's name is logged."""


def _read() -> tuple[Metric, ...]:
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows: list[Any] = list(csv.DictReader(file))
    return tuple(Metric(**row) for row in rows)


METRICS = _read()
GROUPS = {name: tuple(m for m in METRICS if m.group == name) for name in dict.fromkeys(m.group for m in METRICS)}
"""By what their names begin with."""


@functools.cache
def metric_of(name: str) -> Metric | None:
    """The entry of a logged name, None where there is none; one that is written out goes before a family, and of
    families the first.
    """
    for metric in METRICS:
        if metric.name == name:
            return metric
    for metric in METRICS:
        if _pattern(metric.name).fullmatch(name):
            return metric
    return None


def canonical_name(name: str) -> str:
    """The name under which all recipes' metrics can be compared."""
    metric = metric_of(name)
    if metric is None or not metric.same_as:
        return name
    return metric.same_as


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<\w+>", name)
    return re.compile(".+".join(re.escape(part) for part in parts))
