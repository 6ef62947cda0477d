"""Read the folder of a run as plain data for its report: status, curves, timeline.

Files that are missing, incomplete or of an older version are skipped. No file is changed. Times are in seconds since
the first event of the run. The time between the end of one start and the next start is not counted.
"""

from __future__ import annotations

import contextlib
import json
import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from training.tracking.metrics import METRICS, Metric, Row, canonical_name, metric_of
from training.tracking.serialization import flat, json_lines

MAX_CURVES = 300
MAX_ROWS = 48
MAX_STEP_MARKS = 1000
MAX_MEMORY_POINTS = 400
TRAINER = "TRAINER"
BESIDE_STEPS = ("evaluate", "checkpoint")
"""Phases of the trainer that are not part of a step. The first evaluation precedes the training."""
DEFAULT_ROWS: dict[str, Row] = {
    "eval": "better",
    "reward": "better",
    "rollout": "says",
    "timing_s": "fast",
    "perf": "fast",
}


@dataclass(frozen=True)
class Limits:
    """Maximum amount of data in a page."""

    points: int = 80_000
    """Number of points of all curves."""
    bars: int = 16_000
    """Number of bars of all timelines."""
    tokens: int = 110_000
    """Number of tokens of all rollouts."""

    def divided(self, parts: int) -> Limits:
        """Return the limits for one of `parts` equal parts."""
        return Limits(self.points // parts, self.bars // parts, self.tokens // parts)


def short(value: float) -> float | int | None:
    """Return a number rounded to five digits, or None for NaN and infinities."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    # Integers are shorter in JSON. Beyond 1e15 they would be longer than the exponent form.
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def steps_between(values: Sequence[int]) -> list[int]:
    """Return integers as the first one and the differences, which compress well."""
    return [int(b - a) for a, b in zip([0, *values], values)]


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` indices, evenly spaced, including the first and the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, max(most, 1)))})


@dataclass
class Curve:
    """One metric over the steps. A value that was not finite is NaN."""

    x: array[float] = field(default_factory=lambda: array("d"))
    y: array[float] = field(default_factory=lambda: array("d"))

    def add(self, x: float, y: float) -> None:
        """Append a point."""
        self.x.append(x)
        self.y.append(y)


def read_curves(path: Path) -> dict[str, Curve]:
    """Return the numeric metrics of metrics.jsonl, by name."""
    curves: dict[str, Curve] = defaultdict(Curve)
    for record in json_lines(path):
        step = record.pop("step")
        for name in record.pop("nonfinite", ()):
            curves[name].add(step, math.nan)
        for name, value in record.items():
            if name != "time" and isinstance(value, int | float) and not isinstance(value, bool):
                curves[name].add(step, value)
    return dict(curves)


def thin(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a subset of a curve's points: the lowest and the highest point of each stretch, and the ends.

    Args:
        x: [points]
        y: [points], NaN for missing values.
        most: approximate maximum number of points that are kept.
    """
    if len(x) <= most:
        return x, y
    kept = {0, len(x) - 1}
    for stretch in np.array_split(np.arange(len(x)), max(1, most // 2 - 1)):
        known = stretch[~np.isnan(y[stretch])]
        if len(known):
            kept |= {known[y[known].argmin()], known[y[known].argmax()]}
        else:
            # A point without a value keeps the gap visible, however many steps it has.
            kept.add(stretch[0])
    chosen = sorted(kept)
    return x[chosen], y[chosen]


def pack_curves(curves: Mapping[str, Curve], most: int) -> dict[str, Any]:
    """Return curves under the names of this project, with at most `most` points in total."""
    # User code may log any number of metrics. The page counts the omitted ones.
    names = list(curves)[:MAX_CURVES]
    each = max(40, most // max(1, len(names)))
    packed: dict[str, Any] = {}
    # Curves with a canonical name come first, so that they replace equal metrics with another name.
    for name in sorted(names, key=lambda n: canonical_name(n) != n):
        x, y = (np.asarray(column) for column in (curves[name].x, curves[name].y))
        few_x, few_y = thin(x, y, each)
        curve = {"x": steps_between([int(v) for v in few_x]), "y": [short(v) for v in few_y], "of": len(x)}
        if canonical_name(name) != name:
            curve["name"] = name
        packed.setdefault(canonical_name(name), curve)
    return packed


def describe_metrics(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the registry's description of each metric. Metrics with alarms come first, then the order of the registry.

    The row of an unknown metric follows from its group.
    """
    order = {metric.name: i for i, metric in enumerate(METRICS)}
    known = {name: metric_of(name) for name in names}

    def place(name: str) -> tuple[bool, int, str]:
        metric = known[name]
        return (not metric.alarm, order[metric.name], name) if metric else (True, len(order), name)

    described = {}
    for name in sorted(names, key=place):
        row = DEFAULT_ROWS.get(name.partition("/")[0], "healthy")
        metric = known[name] or Metric(name=name, meaning="", row=row)
        described[name] = {part: getattr(metric, part) for part in ("row", "meaning", "unit", "better")}
    return described


Bar = tuple[float, float, int]
"""Begin and duration in seconds, and the activity as an index into the kinds."""


@dataclass
class Events:
    """Contents of events.jsonl, by kind."""

    bars: dict[tuple[str, int], list[Bar]] = field(default_factory=lambda: defaultdict(list))
    """Bars by role and rank."""
    kinds: dict[str, int] = field(default_factory=dict)
    calls: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0, 0.0, 0]))
    """(role, method) -> number of calls, total seconds, seconds of the longest call, number of failed calls."""
    steps: list[tuple[int, float]] = field(default_factory=list)
    total: int = 0
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    training: float | None = None
    """Time at which the first phase of the trainer began."""
    end: float = 0.0
    shift: float | None = None
    """Seconds that are subtracted from the times of later events."""

    def take(self, record: Mapping[str, Any]) -> None:
        """Process one event. Events of user code are ignored."""
        kind = record["event"]
        at = record["began"] if "began" in record else record["time"]
        seconds = record.get("seconds", 0.0)
        if self.shift is None:
            self.shift = at
        elif kind == "job" and record["kind"] == "start":
            self.shift = max(self.shift, at - self.end)  # the time between two starts is not counted
        begin = at - self.shift
        self.end = max(self.end, begin + seconds)
        if kind == "phase":
            self._add_bar(TRAINER, 0, record["phase"], begin, seconds)
            if self.training is None and record["phase"] not in BESIDE_STEPS:
                self.training = begin
        elif kind == "call" and record["role"] != TRAINER:  # the trainer's only call is the whole run
            self._add_bar(record["role"], record["rank"], record["method"], begin, seconds, record.get("failed", False))
        elif kind == "step":
            self.steps.append((record["step"], begin))
            self.total = record["steps"]
        elif kind == "memory":
            self.memory.append((begin, record["bytes"]))
        elif kind == "alarm":
            self.alarms.append({name: record[name] for name in ("alarm", "text", "advice", "step")})
        elif kind == "job":
            fields = {name: str(record[name])[:500] for name in ("kind", "process", "text")}
            self.jobs.append({"t": round(begin, 3), **fields})

    def _add_bar(self, role: str, rank: int, activity: str, begin: float, seconds: float, failed: bool = False) -> None:
        self.bars[role, rank].append((begin, seconds, self.kinds.setdefault(activity, len(self.kinds))))
        call = self.calls[role, activity]
        call[0] += 1
        call[1] += seconds
        call[2] = max(call[2], seconds)
        call[3] += failed


def read_events(path: Path) -> Events:
    """Read events.jsonl in one pass."""
    events = Events()
    for record in json_lines(path):
        # An event of user code may have the name of one of this project's events, but other fields.
        with contextlib.suppress(KeyError, TypeError):
            events.take(record)
    return events


def busy_share(bars: Sequence[Bar], since: float, until: float) -> float:
    """Return the share of a time span in which there was at least one bar."""
    busy, reach = 0.0, since
    for begin, end in sorted((begin, min(begin + seconds, until)) for begin, seconds, _ in bars):
        if end > reach:
            busy += end - max(begin, reach)
            reach = end
    return busy / (until - since) if until > since else 0.0


def merge_bars(bars: Sequence[Bar], most: int) -> list[tuple[float, float, int, float]]:
    """Return begin, seconds, kind and busy share of at most about `most` bars.

    The first and the last bars are kept. Bars between them are merged, and a merged bar has the kind that took longest.
    """
    begin, seconds, kind = (np.array(column) for column in zip(*sorted(bars, key=lambda bar: bar[0])))
    edge = max(1, most // 4)
    between = np.arange(edge, len(begin) - edge)
    if len(begin) <= most:
        groups = [np.array([i]) for i in range(len(begin))]
    else:
        ends = [[np.array([i]) for i in part] for part in (range(edge), range(len(begin) - edge, len(begin)))]
        groups = [*ends[0], *np.array_split(between, max(1, most // 2)), *ends[1]]
    merged = []
    for group in groups:
        start, busy = begin[group[0]], seconds[group].sum()
        length = (begin[group] + seconds[group]).max() - start
        longest = int(np.bincount(kind[group], seconds[group]).argmax())
        merged.append((start, length, longest, min(1.0, busy / length) if length else 1.0))
    return merged


def pack_timeline(events: Events, most: int) -> dict[str, Any] | None:
    """Return rows of bars by role and rank, in milliseconds, or None if nothing was recorded."""
    if not events.bars:
        return None
    since = events.training or 0.0
    ranks: dict[str, list[int]] = defaultdict(list)
    for role, rank in sorted(events.bars, key=lambda key: (key[0] != TRAINER, key)):
        ranks[role].append(rank)
    each_role = max(1, MAX_ROWS // len(ranks))
    shown = [(role, of_role[i]) for role, of_role in ranks.items() for i in evenly(len(of_role), each_role)]
    # Every row keeps some bars, even if there are many ranks.
    each = max(8, most // len(shown))
    idle = {key: 1 - busy_share(bars, since, events.end) for key, bars in events.bars.items()}
    rows = []
    for role, rank in shown:
        merged = merge_bars(events.bars[role, rank], each)
        begins = [round(bar[0] * 1000) for bar in merged]
        row = {"role": role, "rank": rank, "b": steps_between(begins), "k": [bar[2] for bar in merged]}
        row |= {"d": [round(bar[1] * 1000) for bar in merged], "idle": round(idle[role, rank], 4)}
        if len(merged) < len(events.bars[role, rank]):
            row["s"] = [round(bar[3], 2) for bar in merged]
        rows.append(row)
    marks = [events.steps[i] for i in evenly(len(events.steps), MAX_STEP_MARKS)]
    return {
        "end": round(events.end, 3),
        "training": round(since, 3),
        "kinds": list(events.kinds),
        "rows": rows,
        "idle": {role: round(sum(idle[role, r] for r in of_role) / len(of_role), 4) for role, of_role in ranks.items()},
        "ranks": {role: len(of_role) for role, of_role in ranks.items()},
        "bars": sum(len(bars) for bars in events.bars.values()),
        "steps": [[step, round(t, 3)] for step, t in marks],
        "thinned": len(marks) < len(events.steps),
        "starts": [job["t"] for job in events.jobs if job["kind"] == "start"],
        "calls": [[*key, *(short(v) for v in call)] for key, call in sorted(events.calls.items())],
    }


def pack_memory(events: Events) -> dict[str, Any] | None:
    """Return the memory of each role over time, in GB."""
    if not events.memory:
        return None
    chosen = [events.memory[i] for i in evenly(len(events.memory), MAX_MEMORY_POINTS)]
    roles = sorted({role for _, of_roles in chosen for role in of_roles})
    memory = {role: [short(each.get(role, math.nan) / 1e9) for _, each in chosen] for role in roles}
    return {"t": [round(t, 1) for t, _ in chosen], "gb": memory}


def shown_options(tree: Any) -> dict[str, str]:
    """Return options by dotted name, as text. A value that is not a mapping has no options."""
    options: dict[str, str] = {}
    for name, value in flat(tree if isinstance(tree, dict) else {}).items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        options[name] = text if len(text) <= 300 else text[:300] + "…"
    return options
