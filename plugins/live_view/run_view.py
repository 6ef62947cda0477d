"""State of a run, collected from the events of its job and rendered as a few lines of text for a terminal."""

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

SLOW_S = 60.0
"""Duration in seconds after which a call is shown in yellow."""
HUNG_S = 300.0
"""Duration in seconds after which a call is shown in red."""
TRAINER = "TRAINER"
_WHOLE_LIFE = "run"
"""Method of the trainer that lasts as long as the job. It is not shown as a call."""
_PACE_STEPS = 20
"""Number of latest steps from which the remaining time is estimated."""
_SPARK = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_BAR_WIDTH = 24
_OTHER_LINES = 3
_PROMPT_LINES = 2
_RESPONSE_LINES = 5
_ALARMS = 3
_KEPT = 10_000
"""Maximum number of values of a metric, and of characters of a text, that are kept for drawing."""


@dataclass
class _Role:
    """State of the workers of one role. Times are those of the view's clock."""

    size: int
    idle_since: float
    starting: dict[int, float] = field(default_factory=dict)
    """Ranks that are starting, for the first time or again -> time at which they began to."""
    calls: dict[tuple[int, str, float], float] = field(default_factory=dict)
    """(rank, method, time at which it began on the worker) -> time at which the view received it."""
    replaced: int = 0


@dataclass(frozen=True)
class _Activity:
    """Activity of a role's workers, as shown in the line of the role."""

    name: str
    """Name of a method, a phase or a state."""
    seconds: float
    """Number of seconds since it began."""
    notes: str
    """Ranks that are busy, and number of replaced workers."""
    style: str


class RunView:
    """Receives events from the thread of the job and returns frames to the thread that draws."""

    def __init__(
        self, title: str, roles: Mapping[str, int], began: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            title: text of the first line.
            roles: number of workers of each role.
            began: seconds since the epoch at which the user started the run.
            clock: returns monotonic seconds.
        """
        self._title = title
        self._clock = clock
        self._began = clock() - (time.time() - began)
        self._ended: float | None = None
        self._roles = {name: _Role(size, 0.0) for name, size in roles.items()}
        self._status = ""
        self._attempt = 1
        self._memory = 0
        self._has_phases = False
        self._step = self._steps = 0
        self._pace: deque[tuple[float, int]] = deque(maxlen=_PACE_STEPS + 1)
        self._curves: dict[str, deque[float]] = {}
        self._others: dict[str, Any] = {}
        self._sample: tuple[int, Mapping[str, Any]] | None = None
        """Step and fields of a sampled response."""
        self._alarms: deque[AlarmEvent] = deque(maxlen=_ALARMS)
        self._lock = threading.Lock()
        self._all_start()

    def take(self, event: Any) -> None:
        """Process an event of core or of a run. Other events are ignored."""
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
        """Return at most `height` lines of at most `width` cells. Less important lines are dropped if there is no
        room.
        """
        # The lock is held only here: the thread of the job must not wait until a frame is on the screen.
        with self._lock:
            # Lines in drawing order, each with its priority (0 is kept longest).
            blocks = [
                (2, [self._title_line(width)]),
                (0, [self._progress_line(width)]),
                (3, self._curve_lines(width)),
                (6, self._other_lines(width)),
                (1, self._role_lines()),
                (4, self._alarm_lines()),
                (5, self._sample_lines(width)),
            ]
        # The most important blocks get their lines first.
        space = height
        kept: dict[int, list[Text]] = {}
        for rank, lines in sorted(blocks, key=lambda block: block[0]):
            kept[rank] = lines[: max(0, space)]
            space -= len(kept[rank])
        frame = [line for rank, _ in blocks for line in kept[rank]]
        for line in frame:
            line.truncate(width, overflow="ellipsis")
        return frame

    # --- events

    def _take_step(self, event: StepEvent) -> None:
        if event.step < self._step:  # the job restarted from a checkpoint, so the pace is unknown
            self._pace.clear()
        # Repeated steps after a restart do not count twice.
        if not self._pace or event.step > self._pace[-1][1]:
            self._pace.append((self._clock(), event.step))
        self._step = event.step
        self._steps = event.steps
        for name in _headlines(event.shown):
            value = event.metrics[name]
            if isinstance(value, (int, float)):
                self._curves.setdefault(name, deque(maxlen=_KEPT)).append(float(value))
        self._others |= {name: event.metrics[name] for name in event.shown if name not in self._curves}
        if event.sample:
            self._sample = event.step, event.sample

    def _take_work(self, name: str, rank: int, method: str, began: float, seconds: float | None) -> None:
        role = self._roles.setdefault(name, _Role(rank + 1, self._clock()))
        if seconds is None:
            role.calls[rank, method, began] = self._clock()
        elif role.calls.pop((rank, method, began), None) is not None and not role.calls:
            role.idle_since = self._clock()

    def _take_job(self, event: JobEvent) -> None:
        if event.kind == "start":
            for role in self._roles.values():
                role.starting = {}
                role.idle_since = self._clock()
        elif event.kind == "restart":
            self._attempt += 1
            self._has_phases = False
            self._all_start()
        elif event.kind == "stop":
            self._status = "stopping"
        elif event.kind == "end":
            self._status = event.text.partition(":")[0]
            self._ended = self._clock()
        elif event.kind in ("lost", "replaced"):
            for worker in event.process.split("+"):
                name, _, rank = worker.rpartition("-")
                if name in self._roles:
                    self._take_loss(self._roles[name], int(rank), event.kind == "replaced")

    def _take_loss(self, role: _Role, rank: int, is_replaced: bool) -> None:
        if is_replaced:
            role.starting.pop(rank, None)
            role.replaced += 1
            role.idle_since = self._clock()
        else:
            role.starting[rank] = self._clock()
            # Calls of a lost worker never end, so they would be shown until the end of the run.
            role.calls = {call: since for call, since in role.calls.items() if call[0] != rank}

    def _all_start(self) -> None:
        for role in self._roles.values():
            role.calls.clear()
            role.starting = dict.fromkeys(range(role.size), self._clock())

    # --- rendering

    def _now(self) -> float:
        if self._ended is None:
            return self._clock()
        return self._ended

    def _title_line(self, width: int) -> Text:
        space = width - 6
        title = self._title
        if cell_len(title) > space:
            # The end of a title has the run folder, which distinguishes runs.
            title = f"…{title[-space + 1 :]}"
        return Text(f"── {title} ".ljust(width, "─"), style="dim")

    def _progress_line(self, width: int) -> Text:
        parts = ["no step yet"]
        if self._steps:
            parts = [f"step {self._step} of {self._steps}"]
        if self._attempt > 1:
            parts.append(f"attempt {self._attempt}")
        parts += [self._status or self._time_left(), f"{duration(self._now() - self._began)} elapsed"]
        if self._memory:
            parts.append(f"{self._memory / 1e9:.1f} GB")
        text = "  ".join(part for part in parts if part)
        space = min(width - len(text) - 2, _BAR_WIDTH)
        if not self._steps or space < _BAR_WIDTH // 3:
            return Text(text, style="bold")
        full = round(space * min(1.0, self._step / self._steps))
        return Text.assemble((text, "bold"), "  ", ("━" * full, "green"), ("─" * (space - full), "dim"))

    def _time_left(self) -> str:
        if len(self._pace) < 2 or not self._steps:
            return ""
        first_time, first_step = self._pace[0]
        last_time, last_step = self._pace[-1]
        remaining = (last_time - first_time) / (last_step - first_step) * (self._steps - self._step)
        if not remaining:
            return "at its end"
        # The time since the last step has already passed. It counts down between two steps.
        remaining = max(0.0, remaining - (self._now() - last_time))
        return f"about {duration(remaining)} left"

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
        rows: list[tuple[str, str, str, Any]] = []
        for name, role in self._roles.items():
            activity = self._activity(role)
            title = name
            if role.size > 1:
                title += f" x{role.size}"
            rows.append((title, activity.name, duration(activity.seconds), activity))
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines: list[Text] = []
        for title, name, seconds, activity in rows:
            work = f"{name:<{widths[1]}}  {seconds:>{widths[2]}}"
            line = Text.assemble(f"{title:<{widths[0]}}  ", (work, activity.style))
            if activity.notes:
                line.append(f"  {activity.notes}")
            lines.append(line)
        return lines

    def _activity(self, role: _Role) -> _Activity:
        """Return the activity of a role's workers: the call that has lasted longest, or that they are idle."""
        notes: list[str] = []
        if role.replaced:
            notes.append(f"{role.replaced} replaced")
        work = self._work(role)
        if not work:
            return _Activity("idle", self._now() - role.idle_since, ", ".join(notes), "dim")
        (rank, name), since = min(work.items(), key=lambda item: item[1])
        # Ranks that began within the same second are shown as equal: the longest one is not worth naming.
        differ = max(work.values()) - since >= 1.0
        ranks = _ranks(role.size, len({rank for rank, _ in work}), rank, differ)
        if ranks:
            notes.insert(0, ranks)
        seconds = self._now() - since
        style = _style(seconds)
        if name == _WHOLE_LIFE:
            # The call that drives the job is long by nature, so its duration is no sign of a problem.
            style = ""
        return _Activity(name, seconds, ", ".join(notes), style)

    def _work(self, role: _Role) -> dict[tuple[int, str], float]:
        """Return (rank, name) of each activity of the role's workers, with the time at which it began."""
        if role.starting:
            return {(rank, "starts"): since for rank, since in role.starting.items()}
        if role.calls:
            return {(rank, method): since for (rank, method, _), since in role.calls.items()}
        if role is self._roles.get(TRAINER):
            # The trainer drives the run, so it is never idle.
            name = "sets up"
            if self._has_phases:
                name = "between phases"
            return {(0, name): role.idle_since}
        return {}

    def _alarm_lines(self) -> list[Text]:
        return [Text(printable(f"! step {a.step}: {a.text}; {a.advice}"), style="yellow") for a in self._alarms]

    def _sample_lines(self, width: int) -> list[Text]:
        """Return lines with the fields of a response, the end of its prompt, and the beginning of the response."""
        if self._sample is None:
            return []
        step, sample = self._sample
        names = [name for name in ("reward", "score", "status", "label") if name in sample]
        about = ", ".join(f"{name} {console_number(sample[name])}" for name in names)
        lines = [Text(printable(f"a response of step {step}: {about}"))]
        prompt = str(sample.get("prompt", ""))
        response = str(sample.get("response", ""))
        cells = max(2, width)
        lines += [Text(part, style="dim") for part in chop_cells(printable(prompt[-_KEPT:]), cells)[-_PROMPT_LINES:]]
        lines += [Text(part, style="cyan") for part in chop_cells(printable(response[:_KEPT]), cells)[:_RESPONSE_LINES]]
        return lines


def _style(seconds: float) -> str:
    """Return the style of a call by its duration."""
    if seconds > HUNG_S:
        return "bold red"
    if seconds > SLOW_S:
        return "yellow"
    return "green"


def _ranks(size: int, busy: int, longest: int, differ: bool) -> str:
    """Return the ranks of a role that are busy, as text."""
    if size == 1:
        return ""
    if busy == 1:
        return f"rank {longest}"
    parts: list[str] = []
    if busy < size:
        parts.append(f"{busy} ranks")
    if differ:
        parts.append(f"rank {longest} longest")
    return ", ".join(parts)


def _is_eval(name: str) -> bool:
    return canonical_name(name).startswith("eval/")


def _headlines(shown: Sequence[str]) -> list[str]:
    """Return the names of the most informative metrics: the reward, or else a loss with an accuracy, and the first
    metric of an evaluation.
    """
    training = [name for name in shown if not _is_eval(name)]
    rewards = [name for name in training if canonical_name(name).startswith("reward/")]
    headlines = (rewards or training)[:1]
    if headlines and headlines[0].endswith("loss"):
        headlines += [name for name in training if name.endswith("accuracy")][:1]
    return headlines + [name for name in shown if _is_eval(name)][:1]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the course of a metric in at most `width` characters, with the newest values at the right.

    Each character shows the mean of the same number of values, except the first. NaN and infinities are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    each = math.ceil(len(finite) / width)
    ends = range(len(finite), 0, -each)
    means = [sum(part) / len(part) for part in (finite[max(0, end - each) : end] for end in reversed(ends))]
    low = min(means)
    high = max(means)
    if low == high:
        return _SPARK[3] * len(means)
    return "".join(_SPARK[round((mean - low) / (high - low) * (len(_SPARK) - 1))] for mean in means)
