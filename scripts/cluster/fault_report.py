"""Cases of the fault tests on two machines, their reports, and the comparison of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

BYTES = 2_000_000
"""Size of a result. Ray keeps results above 100 kB in the memory of the machine that computed them."""
Fault = Literal["none", "cut", "kill", "pause", "hang"]


@dataclass(frozen=True)
class Split:
    """Number of workers of a role on each machine at the start."""

    near: int = 0
    far: int = 0

    @property
    def total(self) -> int:
        """Number of workers on both machines."""
        return self.near + self.far


@dataclass(frozen=True)
class Case:
    """A fault, the roles of its job, and the expected outcome.

    At most one role has workers on the far machine, and may move. The other roles are bound to the near one.
    """

    claim: str
    fault: Fault
    script: Callable[[Any], Any]
    answer: Any = None
    tools: Split = Split()
    ranks: Split = Split()
    rank_machines: int = 1
    """Number of machines of the ranks."""
    trainer: Split = Split(near=1)
    tool_restarts: int = 3
    attempt: int = 1
    """Expected last attempt of the job."""
    stall_timeout: float = 0.0
    in_setup: bool = False
    """True if the fault comes while the workers of the far machine are set up."""
    machines: int = 2
    """Number of machines. Those besides near and far have free resources only after the job has started."""

    def split(self, role: str) -> Split:
        """Return the placement of a role."""
        return {"TRAINER": self.trainer, "TOOL": self.tools, "ACTOR": self.ranks}[role]


@dataclass
class Report:
    """Outcome of a job. `seconds` is the time from the fault to the end of the job."""

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
        """Return the differences from the claim of the case. `terminal` is the output of the driver."""
        faults = []
        if (self.status, self.attempt) != ("finished", case.attempt):
            faults.append(f"{self.status} in attempt {self.attempt}, not finished in {case.attempt}: {self.error}")
        is_lost = case.fault in ("cut", "kill")
        is_hit = is_lost or case.fault == "hang"
        hit = {name for name, (place, _) in self.before.items() if is_hit and place == far}
        expected = self._expected(case)
        if self.answer != expected:
            faults.append(f"the result is {self.answer}, not {expected}")
        for name, (_, start) in self.before.items():
            place_after, start_after = self.after.get(name, ["nowhere", 0])
            # Before Ray has noticed the loss, a replacement may be placed on the same machine and be lost too.
            is_well = start_after == start + case.attempt - 1
            if name in hit:
                is_well = start_after > start
            if not is_well:
                faults.append(f"{name} began in start {start} and ended in start {start_after}")
            if is_lost and place_after == far:
                faults.append(f"{name} ended on {far}, which is gone")
        return [*faults, *self._wrong_events(case, hit), *self._unsaid(case, hit, terminal)]

    def _expected(self, case: Case) -> Any:
        """Return the expected result, which may depend on the events of the run."""
        if case.script.__name__ == "give":
            starts = {name: start for name, (_, start) in self.after.items() if name != "TRAINER-0"}
            return [[BYTES, starts[name]] for name in sorted(starts)]
        if case.script.__name__ == "count":
            return [len(self.counts[name]) for name in sorted(self.counts)]
        return case.answer

    def _wrong_events(self, case: Case, hit: set[str]) -> list[str]:
        faults = [
            f"events of {name} are missing, double, or out of order: {numbers}"
            for name, numbers in self.counts.items()
            if numbers != list(range(len(numbers)))
        ]
        kinds = [event["kind"] for event in self.events]
        if case.attempt > 1 and kinds.count("restart") != case.attempt - 1:
            faults.append(f"the job's events are {', '.join(kinds)}, without restart")
        if case.attempt == 1:
            for kind in ("lost", "replaced"):
                names = {event["process"] for event in self.events if event["kind"] == kind}
                if names != hit:
                    faults.append(f"{kind} are {sorted(names)}, not {sorted(hit)}")
        return faults

    def _unsaid(self, case: Case, hit: set[str], terminal: str) -> list[str]:
        """Return what the terminal does not report, or reports wrongly."""
        reported = sorted(hit)
        if case.script.__name__ == "meet":
            # Ranks that die because of lost ones are noticed first, and reported in their place.
            reported = [name for name in self.before if name not in hit][-1:]
        unsaid = [name for name in reported if name not in terminal]
        faults = []
        if unsaid:
            faults.append(f"the terminal does not name {', '.join(unsaid)}")
        if case.attempt > 1 and f"attempt {case.attempt}" not in terminal:
            faults.append("the terminal does not report the restart")
        if not hit and " died" in terminal:
            faults.append("the terminal reports a death")
        return faults
