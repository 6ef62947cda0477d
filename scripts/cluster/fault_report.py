"""What is tried on two machines, what becomes of it, and in what that differs from what is to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

BYTES = 2_000_000
"""Ray keeps an answer of more than 100 kB in the memory of the machine that gave it."""
Fault = Literal["none", "cut", "kill", "pause", "hang"]


@dataclass(frozen=True)
class Split:
    """How many workers of a role are on which machine at first."""

    near: int = 0
    far: int = 0

    @property
    def total(self) -> int:
        """On both."""
        return self.near + self.far


@dataclass(frozen=True)
class Case:
    """A fault, what it hits, and what is to come of it.

    One role at most has workers on the far machine, and may move; the others are bound to the near one.
    """

    claim: str
    fault: Fault
    script: Callable[[Any], Any]
    answer: Any = None
    tools: Split = Split()
    ranks: Split = Split()
    rank_machines: int = 1
    """On how many machines the ranks must be."""
    trainer: Split = Split(near=1)
    tool_restarts: int = 3
    attempt: int = 1
    """Which start of the job is to be its last."""
    stall_timeout: float = 0.0
    in_setup: bool = False
    """Whether it comes while the far machine's workers are set up."""
    machines: int = 2
    """How many it takes; what is not near and not far is free only once the job stands."""

    def of(self, role: str) -> Split:
        """Where the workers of a role are."""
        return {"TRAINER": self.trainer, "TOOL": self.tools, "ACTOR": self.ranks}[role]


@dataclass
class Report:
    """What became of the job. `seconds` are from the fault to the end of the job."""

    status: str
    error: str
    attempt: int
    run_id: str
    seconds: float
    events: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, list[int]] = field(default_factory=dict)
    answer: Any = None
    before: dict[str, list[Any]] = field(default_factory=dict)
    after: dict[str, list[Any]] = field(default_factory=dict)

    def wrong(self, case: Case, far: str, terminal: str) -> list[str]:
        """In what this differs from what the case claims; `terminal` is what the driver has printed."""
        found = []
        if (self.status, self.attempt) != ("finished", case.attempt):
            found.append(f"{self.status} in attempt {self.attempt}, not finished in {case.attempt}: {self.error}")
        is_lost = case.fault in ("cut", "kill")
        is_hit = is_lost or case.fault == "hang"
        hit = {name for name, (place, _) in self.before.items() if is_hit and place == far}
        wanted = self._wanted(case)
        if self.answer != wanted:
            found.append(f"the result is {self.answer}, not {wanted}")
        for name, (_, start) in self.before.items():
            place_after, start_after = self.after.get(name, ["nowhere", 0])
            # Until Ray knows, who takes the place of a lost one may be put on the same machine, and be lost too.
            is_well = start_after > start if name in hit else start_after == start + case.attempt - 1
            if not is_well:
                found.append(f"{name} began in start {start} and ended in start {start_after}")
            if is_lost and place_after == far:
                found.append(f"{name} ended on {far}, which is gone")
        return [*found, *self._wrong_events(case, hit), *self._unsaid(case, hit, terminal)]

    def _wanted(self, case: Case) -> Any:
        """The answer, where the case does not know it before the job has run."""
        if case.script.__name__ == "give":
            starts = {name: start for name, (_, start) in self.after.items() if name != "TRAINER-0"}
            return [[BYTES, starts[name]] for name in sorted(starts)]
        if case.script.__name__ == "count":
            return [len(self.counts[name]) for name in sorted(self.counts)]
        return case.answer

    def _wrong_events(self, case: Case, hit: set[str]) -> list[str]:
        found = [
            f"events of {name} are missing, double, or out of order: {numbers}"
            for name, numbers in self.counts.items()
            if numbers != list(range(len(numbers)))
        ]
        kinds = [event["kind"] for event in self.events]
        if case.attempt > 1 and kinds.count("restart") != case.attempt - 1:
            found.append(f"the job's events are {', '.join(kinds)}, without restart")
        if case.attempt == 1:
            for kind in ("lost", "replaced"):
                names = {event["process"] for event in self.events if event["kind"] == kind}
                if names != hit:
                    found.append(f"{kind} are {sorted(names)}, not {sorted(hit)}")
        return found

    def _unsaid(self, case: Case, hit: set[str], terminal: str) -> list[str]:
        """What the person at the terminal has not been told, or wrongly."""
        # Where ranks die of the loss of others, it is they who are told.
        told = sorted(hit) if case.script.__name__ != "meet" else [name for name in self.before if name not in hit][-1:]
        unsaid = [name for name in told if name not in terminal]
        found = [f"the terminal does not name {', '.join(unsaid)}"] if unsaid else []
        if case.attempt > 1 and f"attempt {case.attempt}" not in terminal:
            found.append("the terminal does not report the restart")
        if not hit and " died" in terminal:
            found.append("the terminal reports a death")
        return found
