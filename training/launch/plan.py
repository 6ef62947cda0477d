"""The plan of a run, before anything starts: processes, devices and steps, as a table and as JSON.

A plug-in of the kind "plan" adds the memory of each process, and rejects a run that does not fit. This module does not
import torch.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from components.models.attention import attention_note
from components.registry import find
from core import Job
from core.placement import detect_devices
from training.launch.launch import printed, threads_text
from training.launch.machines import assumed
from training.launch.model_use import ModelUse
from training.tracking import redact

PLAN, MEMORY, CHOICES = "plan", "memory", "choices"
"""Kind of the plug-ins that provide a `MemoryPlanType` and a `Choose`, and their names."""
LAYOUT = "node layout"
"""Kind of the plug-in that places the workers on the nodes before the start."""
Choose = Callable[["Plan", Any, Callable[[Any], "Plan"]], "Plan"]
"""Function that chooses the options that the user left to the machine. It returns a plan with the chosen values and the
reasons.

Args:
    plan: the plan of the requested configuration.
    requested: configuration in which None stands for a value that is left to the machine.
    replan: returns the plan of another requested configuration.
"""
WIDTH = 100
_HEADS = ("memory", "steps", "sends", "with", "chosen", "changed", "unknown", "idle", "absent")
"""Headings of the paragraphs below the table, in their order."""
_NO_MEMORY_PLAN = "not checked: no plug-in plans it, so a run that does not fit fails after its start"
_NOT_OF_THE_RUN = ("run_dir", "dry_run", "assume_devices", "print_config", "rehearse", "emit")


class MemoryPlan(Protocol):
    """Memory that a run needs, computed before it starts."""

    def check(self) -> None:
        """Check that the run can fit.

        Raises:
            ValueError: it cannot; the message says what to set.
        """
        ...

    def columns(self) -> Mapping[str, Sequence[str]]:
        """Return the columns of the table by heading, with a cell for each role of the job. A dash is an empty cell."""
        ...

    def verdicts(self) -> Sequence[str]:
        """Return a verdict for each node of the job."""
        ...

    def paragraphs(self) -> Sequence[tuple[str, str]]:
        """Return texts with their headings: "memory", "sends" or "unknown"."""
        ...

    def fields(self) -> Mapping[str, Any]:
        """Return the fields of plan.json."""
        ...


class MemoryPlanType(Protocol):
    """Constructor of a memory plan that a plug-in provides."""

    def __call__(self, plan: Plan) -> MemoryPlan:
        """Compute the memory of a planned run.

        Raises:
            ValueError: the plan cannot work.
        """
        ...


@dataclass(kw_only=True)
class Plan:
    """Processes, devices, memory and steps of a run, and the reasons for them."""

    recipe: str
    job: Job
    config: Any
    """Configuration with all automatic values resolved."""
    changed: Mapping[str, Any]
    """Options that are not at their defaults, by dotted name."""
    models: Sequence[ModelUse]
    """Models that the processes of the job hold. Those of roles that the job lacks are ignored."""
    longest: int
    """Maximum number of tokens of a sequence."""
    steps: str
    """Arithmetic of the number of steps, or the reason why it is not known yet."""
    choices: Sequence[str]
    """Engines and precision, with the reasons."""
    chosen: Sequence[str] = ()
    """Options that were left to the machine, with the chosen values and the reasons."""
    notes: Sequence[str] = ()
    step_count: int | None = None
    """Number of steps, or None before the data are read."""
    overlaps: bool = False
    """True if roles work at the same time."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Models that this machine lacks, by option, with the reason."""

    def __post_init__(self) -> None:
        self.job.check_backend(self.config.backend)
        # First, because a job that fits on no node has no memory per node either.
        # Without the plug-in, the memory of all workers is counted on one machine, which refuses too many rather than
        # too few.
        layout = find(LAYOUT, "nodes")
        self.nodes: list[int] = layout(self.job) if layout else [0] * len(self.job.placement.bundles)
        options = {name: value for name, value in self.changed.items() if name not in _NOT_OF_THE_RUN}
        self.changed = redact(options)
        processes = self.job.placement.processes
        self.models = [use for use in self.models if use.role in processes]
        for use in self.models:
            self.choices = [*self.choices, *use.check(processes[use.role], self.job.device_type == "GPU")]
        memory_plan_type: MemoryPlanType | None = find(PLAN, MEMORY)
        self.memory = None if memory_plan_type is None else memory_plan_type(self)

    def json(self) -> str:
        """Return plan.json: the job, and the content of the table."""
        job = json.loads(self.job.model_copy(update={"config": redact(self.config)}).model_dump_json())
        fields: dict[str, Any] = {
            "assumed": str(assumed() or "") or None,
            "nodes": self._workers_of_nodes(),
            "idle_nodes": self._idle_nodes(),
            "absent": dict(self.absent),
            "changed": self.changed,
            "chosen": list(self.chosen),
            "arithmetic": self.steps,
        }
        if self.memory is not None:
            fields |= self.memory.fields()
        return json.dumps({**job, **fields}, indent=2)

    def print_config(self, requested: Any, named: Collection[str]) -> None:
        """Print the configuration, and the notes on stderr.

        Args:
            requested: the configuration before automatic values were resolved.
            named: the options that the user has set.
        """
        print(printed(requested, named))
        self._info(self.notes)

    def check_and_show(self, always: bool = False) -> None:
        """Check the memory. The table goes to stderr if the run cannot fit, or always.

        Raises:
            ValueError: see `MemoryPlan.check`.
        """
        try:
            if self.memory is not None:
                self.memory.check()
        except ValueError:
            # The error names one process. The table shows the memory of all, which is needed to choose a remedy.
            self._info(self.lines())
            raise
        if always:
            self._info(self.lines())

    def _info(self, lines: Iterable[str]) -> None:
        for text in lines:
            print(f"{self.recipe}: {text}", file=sys.stderr)

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        lines = [*self._table(), *self._node_lines()]
        if machines := assumed():
            lines.insert(0, f"assumed   {machines}, not this one")
        memory: Sequence[tuple[str, str]] = [("memory", _NO_MEMORY_PLAN)]
        if self.memory is not None:
            memory = self.memory.paragraphs()
        for head, text in sorted([*memory, *self._paragraphs()], key=lambda paragraph: _HEADS.index(paragraph[0])):
            lines += self._wrapped(head, text)
        return [*lines, *self.notes]

    def _paragraphs(self) -> list[tuple[str, str]]:
        """Return the texts below the table with their headings."""
        paragraphs = [("steps", self.steps), ("with", "; ".join(self.choices))]
        paragraphs += [*(("chosen", text) for text in self.chosen), ("changed", self._changed())]
        if (idle := self._idle_nodes()) > 0:
            count = idle + self.job.node_num
            paragraphs.append(("idle", f"{idle} of {count} machines: set placement.nodes={count} to use them all"))
        absent = [("absent", f"{option}: {why}; a run needs it") for option, why in self.absent.items()]
        return [(head, text) for head, text in paragraphs if text] + absent

    def _table(self) -> list[str]:
        """Return the table of roles, processes and devices, with the columns of the memory plan that have a value."""
        placement = self.job.placement
        threads = {role: host.threads for host in placement.hosts for role, _ in host.workers}
        processes: list[str] = []
        for role, count in placement.processes.items():
            device = placement.devices[role] / count
            processes.append(f"{count} x {f'{device:.2g} GPU' if device else threads_text(threads[role])}")
        columns = [[f"on {self.job.device_type}", *map(str.lower, placement.processes)], ["processes", *processes]]
        if self.memory is not None:
            memory = self.memory.columns().items()
            # A column of dashes, as of the cache of an engine that has none, would only make the table wider.
            columns += [[head, *cells] for head, cells in memory if any(cell != "-" for cell in cells)]
        widths = [max(map(len, column)) for column in columns]
        gap = "  " if sum(widths) + 2 * len(widths) <= self._width else " "
        # Texts to the left and numbers to the right, so that the digits of a column are below each other.
        alignments = "<<" + ">" * (len(columns) - 2)
        padded: list[list[str]] = []
        for column, width, alignment in zip(columns, widths, alignments, strict=True):
            padded.append([f"{cell:{alignment}{width}}" for cell in column])
        return [gap.join(row) for row in zip(*padded, strict=True)]

    def _workers_of_nodes(self) -> list[str]:
        """Return a line with the workers of each node, or no lines without a plug-in for the layout."""
        describe = find(LAYOUT, "lines")
        return describe(self.job, self.nodes) if describe else []

    def _node_lines(self) -> list[str]:
        """Return the workers and the verdict of each node, if there are several nodes."""
        texts = self._workers_of_nodes()
        # On one machine, the table above has the same workers already.
        if not texts or (self.job.node_num == 1 and not assumed()):
            return []
        if self.memory is not None:
            texts = list(map("; ".join, zip(texts, self.memory.verdicts(), strict=True)))
        lines = self._wrapped("nodes", texts[0])
        for text in texts[1:]:
            lines += self._wrapped("", text)
        return lines

    def _idle_nodes(self) -> int:
        """Return the number of assumed machines that the run does not use."""
        nodes = getattr(assumed(), "nodes", None) or 0
        return max(nodes - self.job.node_num, 0)

    @property
    def _width(self) -> int:
        # A narrower terminal would break the table, and the paragraphs in the middle of words.
        columns = min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)
        return columns - len(self.recipe) - 2

    def _wrapped(self, head: str, text: str) -> list[str]:
        return textwrap.wrap(f"{head:<10}{text}", self._width, subsequent_indent=" " * 10)

    def _changed(self) -> str:
        text = " ".join(f"{name}={short_value(value)}" for name, value in self.changed.items())
        return textwrap.shorten(text, 2 * (self._width - 10) - 20, placeholder=f" ... ({len(self.changed)} in all)")


def short_value(value: Any) -> str:
    """Write a value as on a command line, with at most 40 characters."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= 40 else f"{text[:37]}..."


def attention_notes(implementation: str | None) -> list[str]:
    """Return a note if another attention implementation than the requested one is used."""
    note = attention_note(implementation, detect_devices())
    return [f"model.{note}"] if note else []
