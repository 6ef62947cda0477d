"""The registry of metrics: what each name means, in which unit, which way is better, and who watches it.

docs/metrics.md is made of it, the report groups its curves by it, and tests hold every metric that a recipe writes to
it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

Row = Literal["better", "healthy", "says", "fast"]
"""Which question of the report a metric answers: is it better, is it healthy, what does it say, how fast is it."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, or one family of them."""

    name: str
    """As it is logged; `<word>` stands for any text without a slash: `eval/<source>_pass<n>`."""
    meaning: str
    """In one sentence."""
    unit: str = ""
    """nats, tokens, s, share, ...; empty for a plain number."""
    better: Literal["higher", "lower", ""] = ""
    """The good direction, where there is one."""
    row: Row
    alarm: str = ""
    """The alarm that watches it, by its name in alarms.py."""
    same_as: str = ""
    """The house's name for the same quantity, where another system's name is logged."""


METRICS: tuple[Metric, ...] = ()


@functools.cache
def metric_of(name: str) -> Metric | None:
    """The entry of a logged name, None where there is none; one that is written out goes before a family."""
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in METRICS if _pattern(metric.name).fullmatch(name)), None)


def house_name(name: str) -> str:
    """The name under which all recipes' metrics can be compared."""
    metric = metric_of(name)
    return metric.same_as if metric is not None and metric.same_as else name


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<\w+>", name)
    return re.compile("[^/]+".join(re.escape(part) for part in parts))
