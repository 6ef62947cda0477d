"""How a run stands, kept from what its job tells, and written as a few lines for a person who watches."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.text import Text

from core import CallEvent, JobEvent, MemoryEvent
from training.terminal.view import printable
from training.tracking.event_types import AlarmEvent, PhaseEvent, StepEvent
from training.tracking.metrics import canonical_name
from training.tracking.serialization import duration
from training.tracking.tracker import console_number

SLOW_S, HUNG_S = 60.0, 300.0
"""From here a call is shown in yellow, and in red."""
TRAINER = "TRAINER"
_WHOLE_LIFE = "run"
"""The call that drives a job, and lasts as long."""
_PACE_STEPS = 20
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH, _BAR_WIDTH = 40, 24
_OTHER_LINES, _PROMPT_LINES, _RESPONSE_LINES, _ALARMS = 3, 2, 5, 3
_KEPT = 10_000
"""So many values of a metric, and characters of a text, are looked at."""


@dataclass
class _Role:
    """What the workers of one role are at. Times are of the view's clock."""

    size: int
    idle_since: float
    starting: dict[int, float] = field(default_factory=dict)
    """Ranks that are not up yet, or not again, and since when."""
    calls: dict[tuple[int, str, float], float] = field(default_factory=dict)
    """(rank, method, when it began there): since when, here."""
    replaced: int = 0


@dataclass(frozen=True)
class _Activity:
    """What the workers of a role do, as the line of the role shows it."""

    name: str
    """Method, phase or state."""
    seconds: float
    """Time since it began."""
    notes: str
    """Ranks that it is about, and replacements."""
    style: str


class RunView:
    """Takes events from the thread of the job, and gives frames to the thread that draws."""

    def __init__(
        self, title: str, roles: Mapping[str, int], began: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            title: the first line.
            roles: how many workers each has.
            began: seconds since the epoch at which the user started the run.
            clock: seconds that only grow.
        """
        self._title, self._clock = title, clock
        self._began = clock() - (time.time() - began)
        self._ended: float | None = None
        self._roles = {name: _Role(size, 0.0) for name, size in roles.items()}
        self._status, self._attempt, self._memory = "", 1, 0
        self._has_phases = False
        self._step = self._steps = 0
        self._pace: deque[tuple[float, int]] = deque(maxlen=_PACE_STEPS + 1)
        self._curves: dict[str, deque[float]] = {}
        self._others: dict[str, Any] = {}
        self._sample: tuple[int, Mapping[str, Any]] | None = None
        """A response, and its step."""
        self._alarms: deque[AlarmEvent] = deque(maxlen=_ALARMS)
        self._lock = threading.Lock()
        self._all_start()

    def take(self, event: Any) -> None:
        """Take in one event of core or of a run; others are passed over."""
        with self._lock:
            match event:
                case StepEvent():
                    self._take_step(event)
                case PhaseEvent():
                    self._has_phases = True
                    self._take_work(TRAINER, 0, event.phase, event.began, event.seconds)
                case CallEvent() if (event.role, event.method) != (TRAINER, _WHOLE_LIFE):
                    self._take_work(event.role, event.rank, event.method, event.began, event.seconds)
                case AlarmEvent():
                    self._alarms.append(event)
                case JobEvent():
                    self._take_job(event)
                case MemoryEvent():
                    self._memory = sum(event.bytes.values())

    def frame(self, width: int, height: int) -> list[Text]:
        """At most `height` lines of at most `width` cells; where they do not fit, the less important are left out."""
        with self._lock:
            # In the order in which they stand, each with its rank among those that want room.
            blocks = [
                (2, [self._title_line(width)]),
                (0, [self._progress_line(width)]),
                (3, self._curve_lines(width)),
                (6, self._other_lines(width)),
                (1, self._role_lines()),
                (4, self._alarm_lines()),
                (5, self._sample_lines(width)),
            ]
        space, kept = height, dict[int, list[Text]]()
        for rank, lines in sorted(blocks, key=lambda block: block[0]):
            kept[rank] = lines[: max(0, space)]
            space -= len(kept[rank])
        frame = [line for rank, _ in blocks for line in kept[rank]]
        for line in frame:
            line.truncate(width, overflow="ellipsis")
        return frame

    # --- what is told

    def _take_step(self, event: StepEvent) -> None:
        if event.step < self._step:  # begun again from a checkpoint
            self._pace.clear()
        if not self._pace or event.step > self._pace[-1][1]:
            self._pace.append((self._clock(), event.step))
        self._step, self._steps = event.step, event.steps
        for name in _headlines(event.shown):
            value = event.metrics[name]
            if isinstance(value, (int, float)):
                self._curves.setdefault(name, deque(maxlen=_KEPT)).append(float(value))
        self._others |= {name: event.metrics[name] for name in event.shown if name not in self._curves}
        if event.sample:
            self._sample = event.step, event.sample

    def _take_work(self, name: str, rank: int, what: str, began: float, seconds: float | None) -> None:
        role = self._roles.setdefault(name, _Role(rank + 1, self._clock()))
        if seconds is None:
            role.calls[rank, what, began] = self._clock()
        elif role.calls.pop((rank, what, began), None) is not None and not role.calls:
            role.idle_since = self._clock()

    def _take_job(self, event: JobEvent) -> None:
        if event.kind == "start":
            for role in self._roles.values():
                role.starting, role.idle_since = {}, self._clock()
        elif event.kind == "restart":
            self._attempt, self._has_phases = self._attempt + 1, False
            self._all_start()
        elif event.kind == "stop":
            self._status = "stopping"
        elif event.kind == "end":
            self._status, self._ended = event.text.partition(":")[0], self._clock()
        elif event.kind in ("lost", "replaced"):
            for worker in event.process.split("+"):
                name, _, rank = worker.rpartition("-")
                if name in self._roles:
                    self._take_loss(self._roles[name], int(rank), event.kind == "replaced")

    def _take_loss(self, role: _Role, rank: int, is_back: bool) -> None:
        if is_back:
            role.starting.pop(rank, None)
            role.replaced += 1
            role.idle_since = self._clock()
        else:
            role.starting[rank] = self._clock()
            role.calls = {call: since for call, since in role.calls.items() if call[0] != rank}

    def _all_start(self) -> None:
        for role in self._roles.values():
            role.calls.clear()
            role.starting = dict.fromkeys(range(role.size), self._clock())

    # --- how it looks

    def _now(self) -> float:
        return self._clock() if self._ended is None else self._ended

    def _title_line(self, width: int) -> Text:
        space = width - 6
        title = self._title if cell_len(self._title) <= space else f"…{self._title[-space + 1 :]}"
        return Text(f"── {title} ".ljust(width, "─"), style="dim")

    def _progress_line(self, width: int) -> Text:
        parts = [f"step {self._step} of {self._steps}"] if self._steps else ["no step yet"]
        parts += [f"attempt {self._attempt}"] * (self._attempt > 1)
        parts += [self._status or self._time_left(), f"{duration(self._now() - self._began)} elapsed"]
        parts += [f"{self._memory / 1e9:.1f} GB"] * (self._memory > 0)
        text = "  ".join(part for part in parts if part)
        space = min(width - len(text) - 2, _BAR_WIDTH)
        if not self._steps or space < _BAR_WIDTH // 3:
            return Text(text, style="bold")
        full = round(space * min(1.0, self._step / self._steps))
        return Text.assemble((text, "bold"), "  ", ("━" * full, "green"), ("─" * (space - full), "dim"))

    def _time_left(self) -> str:
        if len(self._pace) < 2 or not self._steps:
            return ""
        (first, low), (last, high) = self._pace[0], self._pace[-1]
        whole = (last - first) / (high - low) * (self._steps - self._step)
        return f"about {duration(max(0.0, whole - (self._now() - last)))} left" if whole else "at its end"

    def _curve_lines(self, width: int) -> list[Text]:
        names = sorted(self._curves, key=_is_eval)
        longest = max((len(name) for name in names), default=0)
        lines: list[Text] = []
        for name in names:
            head = f"{name:<{longest}}  {console_number(self._curves[name][-1]):>9}  "
            space = max(0, min(_SPARK_WIDTH, width - len(head)))
            lines.append(Text.assemble(head, (sparkline(self._curves[name], space), "cyan")))
        return lines

    def _other_lines(self, width: int) -> list[Text]:
        lines: list[str] = []
        for name, value in self._others.items():
            part = printable(f"{name} {console_number(value)}")
            if lines and cell_len(lines[-1]) + 2 + cell_len(part) <= width:
                lines[-1] += f"  {part}"
            else:
                lines.append(part)
        return [Text(line, style="dim") for line in lines[:_OTHER_LINES]]

    def _role_lines(self) -> list[Text]:
        if self._status == "finished":
            return []
        rows = []
        for name, role in self._roles.items():
            activity = self._activity(role)
            title = f"{name} x{role.size}" if role.size > 1 else name
            rows.append((title, activity.name, duration(activity.seconds), activity))
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        return [
            Text.assemble(
                f"{title:<{widths[0]}}  ",
                (f"{name:<{widths[1]}}  {took:>{widths[2]}}", activity.style),
                f"  {activity.notes}" if activity.notes else "",
            )
            for title, name, took, activity in rows
        ]

    def _activity(self, role: _Role) -> _Activity:
        """Return what the workers of a role do: the call that has lasted longest, or that they are idle."""
        replaced = [f"{role.replaced} replaced"] if role.replaced else []
        work = self._work(role)
        if not work:
            return _Activity("idle", self._now() - role.idle_since, ", ".join(replaced), "dim")
        (rank, name), since = min(work.items(), key=lambda item: item[1])
        differ = max(work.values()) - since >= 1.0
        ranks = _ranks(role.size, len({rank for rank, _ in work}), rank, differ)
        seconds = self._now() - since
        notes = ", ".join([ranks, *replaced] if ranks else replaced)
        return _Activity(name, seconds, notes, "" if name == _WHOLE_LIFE else _style(seconds))

    def _work(self, role: _Role) -> dict[tuple[int, str], float]:
        """Return (rank, name) of what the workers of a role do, and the time at which it began."""
        if role.starting:
            return {(rank, "starts"): since for rank, since in role.starting.items()}
        if role.calls:
            return {(rank, method): since for (rank, method, _), since in role.calls.items()}
        if role is self._roles.get(TRAINER):
            # The trainer drives the run, so it is never idle.
            return {(0, "between phases" if self._has_phases else "sets up"): role.idle_since}
        return {}

    def _alarm_lines(self) -> list[Text]:
        return [Text(printable(f"! step {a.step}: {a.text}; {a.advice}"), style="yellow") for a in self._alarms]

    def _sample_lines(self, width: int) -> list[Text]:
        """One line about a response, the end of its prompt, and its beginning."""
        if self._sample is None:
            return []
        step, sample = self._sample
        names = [name for name in ("reward", "score", "status", "label") if name in sample]
        about = ", ".join(f"{name} {console_number(sample[name])}" for name in names)
        lines = [Text(printable(f"a response of step {step}: {about}"))]
        prompt, response = (str(sample.get(name, "")) for name in ("prompt", "response"))
        cells = max(2, width)
        lines += [Text(part, style="dim") for part in chop_cells(printable(prompt[-_KEPT:]), cells)[-_PROMPT_LINES:]]
        lines += [Text(part, style="cyan") for part in chop_cells(printable(response[:_KEPT]), cells)[:_RESPONSE_LINES]]
        return lines


def _style(seconds: float) -> str:
    """Return the style of a call that has lasted for a time."""
    if seconds > HUNG_S:
        return "bold red"
    return "yellow" if seconds > SLOW_S else "green"


def _ranks(size: int, busy: int, longest: int, differ: bool) -> str:
    """Which of a role's workers are at work."""
    if size == 1:
        return ""
    if busy == 1:
        return f"rank {longest}"
    return ", ".join(part for part in (f"{busy} ranks" * (busy < size), f"rank {longest} longest" * differ) if part)


def _is_eval(name: str) -> bool:
    return canonical_name(name).startswith("eval/")


def _headlines(shown: Sequence[str]) -> list[str]:
    """Of the metrics that a person is to see those whose course says most: the reward, or else a loss and what goes
    with it; and the first of an evaluation.
    """
    own = [name for name in shown if not _is_eval(name)]
    rewards = [name for name in own if canonical_name(name).startswith("reward/")]
    found = (rewards or own)[:1]
    if found and found[0].endswith("loss"):
        found += [name for name in own if name.endswith("accuracy")][:1]
    return found + [name for name in shown if _is_eval(name)][:1]


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of a metric in at most `width` characters, the newest at the right; each is the mean of as many values
    as the others, but for the first. NaN and infinities are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    each = math.ceil(len(finite) / width)
    ends = range(len(finite), 0, -each)
    means = [sum(part) / len(part) for part in (finite[max(0, end - each) : end] for end in reversed(ends))]
    low, high = min(means), max(means)
    if low == high:
        return _SPARK[3] * len(means)
    return "".join(_SPARK[round((mean - low) / (high - low) * (len(_SPARK) - 1))] for mean in means)
