"""The registry of metrics: meaning, unit, better direction and alarms of each name.

The entries are the rows of metrics.csv. docs/metrics.md is generated from them, and the report groups its curves by
them. Tests check that every metric of our recipes has an entry. Metrics of a user's own recipe need none.
"""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Row = Literal["better", "healthy", "says", "fast"]
"""Row of the report that shows the curve of a metric: `better`, scores and losses; `healthy`, the update; `says`,
rollouts; `fast`, speed and memory."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, or one family of metrics. A row of metrics.csv."""

    name: str
    """Name in the log. `<word>` is a placeholder for any text, as in `eval/<source>_pass<n>`."""
    row: Row
    meaning: str
    """Description in one sentence."""
    group: str = ""
    """Common prefix of the names of the group. Empty for the names of verl, whose prefixes differ."""
    unit: str = ""
    """Unit, such as nats, tokens, s or share. Empty for a number without a unit."""
    better: Literal["higher", "lower", ""] = ""
    """Direction of improvement. Empty if neither direction is better."""
    alarm: str = ""
    """Names of the alarms that watch the metric, as in alarms.py, separated by commas."""
    same_as: str = ""
    """Our name of the same quantity, if `name` is the name in another system."""


def _read() -> tuple[Metric, ...]:
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows: list[Any] = list(csv.DictReader(file))
    return tuple(Metric(**row) for row in rows)


METRICS = _read()
GROUPS = {name: tuple(m for m in METRICS if m.group == name) for name in dict.fromkeys(m.group for m in METRICS)}
"""Metrics by group, in the order of metrics.csv."""


@functools.cache
def metric_of(name: str) -> Metric | None:
    """Return the entry of a logged name, or None. An entry with exactly this name precedes those with placeholders."""
    # Two passes: a name with a placeholder, such as `reward/<name>`, also matches names with an entry of their own.
    for metric in METRICS:
        if metric.name == name:
            return metric
    for metric in METRICS:
        if _pattern(metric.name).fullmatch(name):
            return metric
    return None


def canonical_name(name: str) -> str:
    """Return the name that all recipes share for the same quantity, so that their metrics can be compared."""
    metric = metric_of(name)
    if metric is None or not metric.same_as:
        return name
    return metric.same_as


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<\w+>", name)
    return re.compile(".+".join(re.escape(part) for part in parts))
