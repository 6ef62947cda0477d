"""A small job on two machines, for each of the faults that it has to survive, and what must have come of it.

    RAY_ADDRESS=NEAR:6379 python scripts/cluster/fault_job.py CASE FOLDER NEAR FAR

NEAR is the address of this machine in Ray, FAR that of the one that is to be hit; all nodes are idle and see FOLDER.
scripts/cluster/faults.py calls this, and strikes when the job says that it is ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import ray  # noqa: E402
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group  # noqa: E402

from core import BaseTrainer, BaseWorkload, JobBuilder, JobEvent, RoleGroup, trainer_invocation  # noqa: E402

CPU = 0.25
"""Of each process: they wait most of the time."""
BYTES = 2_000_000
"""Ray keeps an answer of more than 100 kB in the memory of the machine that gave it."""
GUARD_S = 150.0
"""Against a hang: nothing here takes so long."""
LOOK_S = 0.1
AFTER_PAUSE_S = 3.0

Fault = Literal["none", "cut", "kill", "pause"]


def wait_until(reached: Callable[[], bool]) -> None:
    """Wait for something, and raise TimeoutError if it does not come."""
    deadline = time.monotonic() + GUARD_S
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not reached after {GUARD_S:g} s: {reached.__qualname__}")
        time.sleep(LOOK_S)


@dataclass(frozen=True)
class Count:
    """An event of a workload."""

    worker: str
    number: int


class Worker(BaseWorkload):
    """An instance or a rank. FOLDER has what it did, and what was done to its machine."""

    def setup(self) -> None:
        self.folder = Path(self.config["folder"])
        if self.config["case"] == "shared_memory":
            self.shared_dir.mkdir(exist_ok=True)
            (self.shared_dir / self.name).write_text("left to core to remove")

    @trainer_invocation
    def place(self) -> tuple[str, int]:
        """On which machine I am, and which start of mine this is."""
        return ray.util.get_node_ip_address(), self.attempt

    @trainer_invocation(blocking=False, idempotent=True)
    def hold(self, items: list[int]) -> list[int]:
        """Double the items, but not before the fault."""
        self._note("held")
        wait_until((self.folder / "struck").exists)
        return [2 * item for item in items]

    @trainer_invocation(blocking=False, idempotent=True)
    def meet(self, items: list[int]) -> list[int]:
        """As ranks that meet in a collective: whoever is left dies of the loss of the others, at once."""
        doubled = self.hold(items)
        if self.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return doubled

    @trainer_invocation(blocking=False, idempotent=True)
    def give(self) -> bytes:
        """An answer that says which start of mine gave it."""
        self._note("held")
        return bytes([self.attempt]) * BYTES

    @trainer_invocation(blocking=False)
    def count(self) -> int:
        """Emit events from before the fault until a while after it; returns how many."""
        self._note("held")
        number = 0
        end: float | None = None
        while end is None or time.monotonic() < end:
            self.emit(Count(self.name, number))
            number += 1
            time.sleep(LOOK_S)
            if end is None and (self.folder / "healed").exists():
                end = time.monotonic() + AFTER_PAUSE_S
        return number

    def _note(self, what: str) -> None:
        (self.folder / f"{what}-{self.name}").touch()


class Trainer(BaseTrainer):
    """Runs the script of the case, and writes down who was where before and after."""

    def init(self) -> None:
        self.folder = Path(self.config["folder"])
        roles = [role for role in ("TOOL", "ACTOR") if CASES[self.config["case"]].of(role).total]
        self.groups = [RoleGroup(role) for role in roles]

    def fit(self) -> None:
        before = self.folder / "before.json"
        if not before.exists():
            before.write_text(json.dumps(self.places()))
        answer = CASES[self.config["case"]].script(self)
        (self.folder / "after.json").write_text(json.dumps({"answer": answer, "places": self.places()}))

    def places(self) -> dict[str, tuple[str, int]]:
        """Of each worker its machine, and which start of it this is."""
        found = {"TRAINER-0": (ray.util.get_node_ip_address(), self.attempt)}
        for group in self.groups:
            found |= {member.name: place for member, place in zip(group, group.place(), strict=True)}
        return found

    def ready(self, *groups: RoleGroup[Any]) -> None:
        """Let the fault come, once all of these are in their call."""
        names = [member.name for group in groups for member in group]
        wait_until(lambda: all((self.folder / f"held-{name}").exists() for name in names))
        (self.folder / "ready").touch()

    def wait_for_strike(self) -> None:
        """Return once the fault has come."""
        wait_until((self.folder / "struck").exists)


# --- what the trainer does


def hold(trainer: Trainer) -> Any:
    """Everybody is in a call when it happens."""
    (group,) = trainer.groups
    answers = group.hold(list(range(len(group))))
    trainer.ready(group)
    return [item for part in answers.result() for item in part]


def meet(trainer: Trainer) -> Any:
    """The others of those that it hits die of it long before Ray knows."""
    (group,) = trainer.groups
    answers = group.meet(list(range(len(group))))
    trainer.ready(group)
    return [item for part in answers.result() for item in part]


def die_while_driving(trainer: Trainer) -> Any:
    """It happens to the trainer itself, which waits for an answer."""
    answer = hold(trainer)
    if trainer.attempt == 1:
        wait_until(lambda: False)
    return answer


def give(trainer: Trainer) -> Any:
    """Answers have been given when it happens, and are fetched only then."""
    (group,) = trainer.groups
    given = group.give()
    wait_until(lambda: all((trainer.folder / f"held-{member.name}").exists() for member in group))
    time.sleep(AFTER_PAUSE_S)  # from the last line of the method to the store of its machine
    trainer.ready(group)
    trainer.wait_for_strike()
    return [[len(answer), answer[0]] for answer in given.result()]


def count(trainer: Trainer) -> Any:
    """Events are on their way when it happens."""
    (group,) = trainer.groups
    counting = group.count()
    trainer.ready(group)
    return counting.result()


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
    script: Callable[[Trainer], Any]
    answer: Any = None
    tools: Split = Split()
    ranks: Split = Split()
    rank_machines: int = 1
    """On how many machines the ranks must be."""
    trainer: Split = Split(near=1)
    tool_restarts: int = 3
    attempt: int = 1
    """Which start of the job is to be its last."""
    machines: int = 2
    """How many it takes; what is not near and not far is free only once the job stands."""

    def of(self, role: str) -> Split:
        """Where the workers of a role are."""
        return {"TRAINER": self.trainer, "TOOL": self.tools, "ACTOR": self.ranks}[role]


CASES = {
    "none": Case(
        claim="a job on two machines finishes",
        fault="none",
        script=hold,
        answer=[0, 2, 4, 6],
        tools=Split(near=2, far=2),
    ),
    "shared_memory": Case(
        claim="what workers leave in the shared memory of a machine without the driver is removed",
        fault="none",
        script=hold,
        answer=[0, 2],
        tools=Split(near=1, far=1),
    ),
    "cut_in_a_call": Case(
        claim="instances whose machine loses its power in a call are replaced, and asked again",
        fault="cut",
        script=hold,
        answer=[0, 2, 4, 6],
        tools=Split(near=2, far=2),
    ),
    "kill_half": Case(
        claim="a machine that takes four of eight instances along is one incident of max_restarts",
        fault="kill",
        script=hold,
        answer=[0, 2, 4, 6, 8, 10, 12, 14],
        tools=Split(near=4, far=4),
        tool_restarts=1,
    ),
    "cut_rank": Case(
        claim="a job whose ranks lose their machine starts again on the other",
        fault="cut",
        script=hold,
        answer=[0, 2],
        ranks=Split(far=2),
        attempt=2,
    ),
    "cut_spread": Case(
        claim="a job that starts again before Ray knows of a death does so on the machines that are left",
        fault="cut",
        script=meet,
        answer=[0, 2],
        ranks=Split(near=1, far=1),
        rank_machines=2,
        attempt=2,
        machines=3,
    ),
    "cut_trainer": Case(
        claim="a job whose trainer loses its machine starts again on the other",
        fault="cut",
        script=die_while_driving,
        answer=[0],
        tools=Split(near=1),
        trainer=Split(far=1),
        attempt=2,
    ),
    "pause": Case(
        claim="five seconds without a network end nobody, and no event is lost",
        fault="pause",
        script=count,
        tools=Split(near=1, far=1),
    ),
    "lost_answer": Case(
        claim="an answer that was given, and lost with its machine before it was fetched, is asked for again",
        fault="cut",
        script=give,
        tools=Split(near=1, far=1),
    ),
}


# --- the driver


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
        hit = {name for name, (place, _) in self.before.items() if is_lost and place == far}
        wanted = self._wanted(case)
        if self.answer != wanted:
            found.append(f"the answer is {self.answer}, not {wanted}")
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
        if case.script is give:
            starts = {name: start for name, (_, start) in self.after.items() if name != "TRAINER-0"}
            return [[BYTES, starts[name]] for name in sorted(starts)]
        if case.script is count:
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
        told = sorted(hit) if case.script is not meet else [name for name in self.before if name not in hit][-1:]
        unsaid = [name for name in told if name not in terminal]
        found = [f"the terminal does not name {', '.join(unsaid)}"] if unsaid else []
        if case.attempt > 1 and f"attempt {case.attempt}" not in terminal:
            found.append("the terminal does not tell of the restart")
        if not hit and " died" in terminal:
            found.append("the terminal tells of a death")
        return found


def alive_node(address: str) -> dict[str, Any]:
    """The Ray node at an address; waits until one that was there before is known to be dead."""
    nodes: list[dict[str, Any]] = []

    def only_one() -> bool:
        nodes[:] = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == address]
        return len(nodes) == 1

    wait_until(only_one)
    return nodes[0]


def block(node: dict[str, Any], but: float) -> PlacementGroup:
    """Hold all CPUs of a node but so many, so that Ray has no choice of where to put the job."""
    where = {"ray.io/node-id": node["NodeID"]}
    held = placement_group([{"CPU": node["Resources"]["CPU"] - but}], bundle_label_selector=[where])
    if not held.wait(GUARD_S):
        raise TimeoutError(f"the node at {node['NodeManagerAddress']} is not idle; end the other jobs there")
    return held


def build(case: Case, name: str, folder: Path, near: str) -> Any:
    """The job of a case."""
    builder = JobBuilder().device_type("CPU").config({"case": name, "folder": str(folder)}).recovery(max_restarts=3)
    for role in ("TRAINER", "TOOL", "ACTOR"):
        split = case.of(role)
        if not split.total:
            continue
        builder.role(role)
        if role == "TRAINER":
            builder.run("fault_job:Trainer")
        elif role == "TOOL":
            builder.run("fault_job:Worker").max_restarts(case.tool_restarts)
        else:
            builder.train("fault_job:Worker").nnodes(case.rank_machines)
        bound: dict[str, Any] = {} if split.far else {f"node:{near}": 0.001}
        builder.nproc_per_node(split.total // case.rank_machines if role == "ACTOR" else split.total)
        builder.resource(cpu=CPU, **bound)
    return builder.build()


def main(name: str, place: str, near: str, far: str) -> int:
    """Run the job of a case, and write the report; returns the job's exit code."""
    case, folder = CASES[name], Path(place)
    ray.init(log_to_driver=False)
    splits = [case.trainer, case.tools, case.ranks]
    free = {near: sum(split.near for split in splits), far: sum(split.far for split in splits)}
    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    held = [block(alive_node(address), CPU * free.get(address, 0)) for address in addresses]
    report = Report("", "", 0, "", 0.0)

    def observe(event: Any) -> None:
        if isinstance(event, JobEvent):
            report.events.append(asdict(event))
            if event.kind == "start":
                while held:  # the job stands; from now on there is room for it elsewhere
                    remove_placement_group(held.pop())
        elif isinstance(event, Count):
            report.counts.setdefault(event.worker, []).append(event.number)

    result = build(case, name, folder, near).submit("faults", log_dir=folder / "logs", observers=[observe])
    report.status, report.error, report.attempt = result.status, result.error, result.attempt
    report.run_id = result.run_id
    with contextlib.suppress(OSError):  # it ended before the fault
        report.seconds = time.time() - (folder / "struck").stat().st_mtime
        report.before = json.loads((folder / "before.json").read_text())
        after = json.loads((folder / "after.json").read_text())
        report.answer, report.after = after["answer"], after["places"]
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=1))
    return result.exit_code


if __name__ == "__main__":
    import fault_job  # what it pickles is of this module, as the workers find it

    sys.exit(fault_job.main(*sys.argv[1:]))
