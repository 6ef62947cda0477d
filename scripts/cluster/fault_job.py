"""Run a small job on two machines for one of the faults that a job must survive, and write a report.

    RAY_ADDRESS=NEAR:6379 python scripts/cluster/fault_job.py CASE FOLDER NEAR FAR

NEAR is the address of this machine in Ray, FAR that of the machine that the fault hits. All nodes must be idle, and see
FOLDER. scripts/cluster/faults.py starts this script, and causes the fault when the job is ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import ray  # noqa: E402
from fault_report import BYTES, Case, Report, Split  # noqa: E402
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group  # noqa: E402

from core import BaseTrainer, BaseWorkload, JobBuilder, JobEvent, RoleGroup, trainer_invocation  # noqa: E402
from plugins.resume.checkpoints import read_state  # noqa: E402
from training.run.checkpoint import Checkpoints  # noqa: E402

CPU = 0.25
"""Cores per process. The processes mostly wait."""
GUARD_S = 150.0
"""Timeout in seconds of every wait."""
LOOK_S = 0.1
AFTER_PAUSE_S = 3.0
SAVES = 3
"""Number of checkpoints of a job. The fault comes in the middle of the second."""
STALL_S = 15.0
"""stall_timeout in seconds of the cases with hanging workers. All other waits are shorter."""


def wait_until(reached: Callable[[], bool]) -> None:
    """Wait until `reached` returns True.

    Raises:
        TimeoutError: it has not within `GUARD_S` seconds.
    """
    deadline = time.monotonic() + GUARD_S
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not reached after {GUARD_S:g} s: {reached.__qualname__}")
        time.sleep(LOOK_S)


@dataclass(frozen=True)
class Count:
    """A numbered event of a workload."""

    worker: str
    number: int


class Worker(BaseWorkload):
    """An instance or a rank. Files in FOLDER show its progress, and the fault of its machine."""

    def setup(self) -> None:
        self.folder = Path(self.config["folder"])
        is_far = ray.util.get_node_ip_address() == self.config["far"]
        self.is_struck = is_far and self.attempt == 1
        if CASES[self.config["case"]].in_setup and self.is_struck:
            (self.folder / "before.json").write_text(json.dumps({self.name: self.place()}))
            (self.folder / "ready").touch()
            wait_until(lambda: False)
        if self.config["case"] == "shared_memory":
            self.shared_dir.mkdir(exist_ok=True)
            (self.shared_dir / self.name).write_text("left to core to remove")

    @trainer_invocation
    def place(self) -> tuple[str, int]:
        """Return (address of the machine, attempt) of this worker."""
        return ray.util.get_node_ip_address(), self.attempt

    @trainer_invocation(blocking=False, idempotent=True)
    def hold(self, items: list[int]) -> list[int]:
        """Return the doubled items after the fault."""
        self._note("held")
        wait_until((self.folder / "struck").exists)
        return [2 * item for item in items]

    @trainer_invocation(blocking=False, idempotent=True)
    def stick(self, items: list[int]) -> list[int]:
        """Return the doubled items. On the far machine hang instead: odd ranks are stopped, even ones wait forever."""
        doubled = self.hold(items)
        # Two kinds of hanging: a process that does not run at all, and one whose call never ends.
        if self.is_struck and self.rank % 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.is_struck:
            wait_until(lambda: False)
        return doubled

    @trainer_invocation(blocking=False)
    def save(self, folder: str, step: int) -> int:
        """Write one part of a checkpoint and return its size. The second checkpoint is half written at the fault."""
        file = Path(folder) / "state" / self.name
        # Half of the file, so that the fault leaves an incomplete checkpoint behind.
        file.write_bytes(bytes(BYTES // 2))
        if step == 2 and self.attempt == 1:
            self._note("held")
            wait_until((self.folder / "struck").exists)
            # A worker that is not hit is ended with the others, or called again.
            wait_until(lambda: False)
        with file.open("ab") as stream:
            stream.write(bytes(BYTES // 2))
        return file.stat().st_size

    @trainer_invocation(blocking=False, idempotent=True)
    def meet(self, items: list[int]) -> list[int]:
        """Return the doubled items. Die in the first attempt, as ranks do when a collective loses a member."""
        doubled = self.hold(items)
        if self.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return doubled

    @trainer_invocation(blocking=False, idempotent=True)
    def give(self) -> bytes:
        """Return a large result that contains the attempt."""
        self._note("held")
        return bytes([self.attempt]) * BYTES

    @trainer_invocation(blocking=False)
    def count(self) -> int:
        """Emit events from before the fault until some seconds after it. Return their number."""
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

    def _note(self, event: str) -> None:
        (self.folder / f"{event}-{self.name}").touch()


class Trainer(BaseTrainer):
    """Trainer that runs the script of the case, and writes the placement before and after."""

    def init(self) -> None:
        self.folder = Path(self.config["folder"])
        roles = [role for role in ("TOOL", "ACTOR") if CASES[self.config["case"]].split(role).total]
        self.groups = [RoleGroup(role) for role in roles]

    def fit(self) -> None:
        before = self.folder / "before.json"
        if not before.exists():  # otherwise the job was restarted, or hit during set-up
            before.write_text(json.dumps(self.places()))
        answer = CASES[self.config["case"]].script(self)
        (self.folder / "after.json").write_text(json.dumps({"answer": answer, "places": self.places()}))

    def places(self) -> dict[str, tuple[str, int]]:
        """Return worker -> (address of its machine, attempt)."""
        places = {"TRAINER-0": (ray.util.get_node_ip_address(), self.attempt)}
        for group in self.groups:
            places |= {member.name: place for member, place in zip(group, group.place(), strict=True)}
        return places

    def ready(self, *groups: RoleGroup[Any]) -> None:
        """Request the fault once all members of these groups are in their call."""
        names = [member.name for group in groups for member in group]
        wait_until(lambda: all((self.folder / f"held-{name}").exists() for name in names))
        (self.folder / "ready").touch()

    def wait_for_strike(self) -> None:
        """Wait for the fault."""
        wait_until((self.folder / "struck").exists)


# --- scripts of the trainer


def hold(trainer: Trainer) -> Any:
    """All workers are in a call at the fault."""
    (group,) = trainer.groups
    answers = group.hold(list(range(len(group))))
    trainer.ready(group)
    return [item for part in answers.result() for item in part]


def meet(trainer: Trainer) -> Any:
    """The other ranks die of the fault long before Ray notices it."""
    (group,) = trainer.groups
    answers = group.meet(list(range(len(group))))
    trainer.ready(group)
    return [item for part in answers.result() for item in part]


def stick(trainer: Trainer) -> Any:
    """Workers hang, and their machine stays up."""
    (group,) = trainer.groups
    answers = group.stick(list(range(len(group))))
    trainer.ready(group)
    return [item for part in answers.result() for item in part]


def double(trainer: Trainer) -> Any:
    """The fault came before the call, during set-up."""
    (group,) = trainer.groups
    return [item for part in group.hold(list(range(len(group)))).result() for item in part]


def save(trainer: Trainer) -> Any:
    """The fault comes in the middle of the second checkpoint.

    Returns:
        The step from which the job resumed, the checkpoints at the end, and the bytes that each worker wrote of the
        last one.
    """
    (group,) = trainer.groups
    store = Checkpoints(trainer.folder / "checkpoints")
    latest = store.latest()
    first = 0
    if latest:
        first = read_state(latest)["step"]

    def write(folder: Path) -> None:
        saving = group.save(str(folder), step)
        if step == 2 and trainer.attempt == 1:
            trainer.ready(group)
        sizes[:] = saving.result()

    sizes: list[int] = []
    for step in range(first + 1, SAVES + 1):
        store.save(step, {"step": step}, write)
    return [first, sorted(path.name for path in store.folder.iterdir()), sizes]


def die_while_driving(trainer: Trainer) -> Any:
    """The fault hits the trainer itself while it waits for a result."""
    answer = hold(trainer)
    if trainer.attempt == 1:
        wait_until(lambda: False)
    return answer


def give(trainer: Trainer) -> Any:
    """Results are computed before the fault and fetched after it."""
    (group,) = trainer.groups
    future = group.give()
    wait_until(lambda: all((trainer.folder / f"held-{member.name}").exists() for member in group))
    time.sleep(AFTER_PAUSE_S)  # for the result to reach the object store of its machine
    trainer.ready(group)
    trainer.wait_for_strike()
    return [[len(answer), answer[0]] for answer in future.result()]


def count(trainer: Trainer) -> Any:
    """Events are in transit at the fault."""
    (group,) = trainer.groups
    counting = group.count()
    trainer.ready(group)
    return counting.result()


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
    "cut_in_setup": Case(
        claim="an instance whose machine loses its power while it is set up is started again on another",
        fault="cut",
        script=double,
        answer=[0, 2],
        tools=Split(near=1, far=1),
        in_setup=True,
    ),
    "kill_rank_in_setup": Case(
        claim="a job whose rank is killed with its machine's Ray while it is set up starts again on the other",
        fault="kill",
        script=double,
        answer=[0],
        ranks=Split(far=1),
        attempt=2,
        in_setup=True,
    ),
    "cut_in_a_checkpoint": Case(
        claim="a job whose ranks lose their machine in a checkpoint continues from the whole one before it",
        fault="cut",
        script=save,
        answer=[1, ["latest", "step_1", "step_2", "step_3"], [BYTES, BYTES]],
        ranks=Split(far=2),
        attempt=2,
    ),
    "kill_trainer_in_a_checkpoint": Case(
        claim="a job whose trainer is killed with its machine's Ray in a checkpoint continues from the one before it",
        fault="kill",
        script=save,
        answer=[1, ["latest", "step_1", "step_2", "step_3"], [BYTES]],
        ranks=Split(near=1),
        trainer=Split(far=1),
        attempt=2,
    ),
    "hang": Case(
        claim="instances that hang on another machine, stopped or in a loop, are ended, replaced, and asked again",
        fault="hang",
        script=stick,
        answer=[0, 2],
        tools=Split(far=2),
        stall_timeout=STALL_S,
    ),
    "hang_rank": Case(
        claim="a job whose rank hangs on another machine starts again",
        fault="hang",
        script=stick,
        answer=[0],
        ranks=Split(far=1),
        attempt=2,
        stall_timeout=STALL_S,
    ),
    "pause": Case(
        claim="five seconds without a network end nobody, and no event is lost",
        fault="pause",
        script=count,
        tools=Split(near=1, far=1),
    ),
    "lost_answer": Case(
        claim="a result that was computed, and lost with its machine before it was fetched, is asked for again",
        fault="cut",
        script=give,
        tools=Split(near=1, far=1),
    ),
}


# --- the driver


def alive_node(address: str) -> dict[str, Any]:
    """Return the Ray node at an address. Wait until Ray has marked earlier nodes of the address as dead."""
    nodes: list[dict[str, Any]] = []

    def is_single_process() -> bool:
        nodes[:] = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == address]
        return len(nodes) == 1

    wait_until(is_single_process)
    return nodes[0]


def block(node: dict[str, Any], but: float) -> PlacementGroup:
    """Reserve all CPUs of a node except `but`, so that the placement of the job is determined."""
    where = {"ray.io/node-id": node["NodeID"]}
    held = placement_group([{"CPU": node["Resources"]["CPU"] - but}], bundle_label_selector=[where])
    if not held.wait(GUARD_S):
        raise TimeoutError(f"the node at {node['NodeManagerAddress']} is not idle; end the other jobs there")
    return held


def build(case: Case, name: str, folder: Path, near: str, far: str) -> Any:
    """Return the job of a case."""
    builder = JobBuilder().device_type("CPU").config({"case": name, "folder": str(folder), "far": far})
    builder.recovery(max_restarts=3, stall_timeout=case.stall_timeout)
    for role in ("TRAINER", "TOOL", "ACTOR"):
        split = case.split(role)
        if not split.total:
            continue
        builder.role(role)
        if role == "TRAINER":
            builder.run("fault_job:Trainer")
        elif role == "TOOL":
            builder.run("fault_job:Worker").max_restarts(case.tool_restarts)
        else:
            builder.train("fault_job:Worker").nnodes(case.rank_machines)
        bound: dict[str, Any] = {}
        if not split.far:
            bound[f"node:{near}"] = 0.001
        machines = case.rank_machines if role == "ACTOR" else 1
        builder.nproc_per_node(split.total // machines)
        builder.resource(cpu=CPU, **bound)
    return builder.build()


def main(name: str, place: str, near: str, far: str) -> int:
    """Run the job of a case, and write the report. Return the exit code of the job."""
    case = CASES[name]
    folder = Path(place)
    ray.init(log_to_driver=False)
    splits = [case.trainer, case.tools, case.ranks]
    free = {near: sum(split.near for split in splits), far: sum(split.far for split in splits)}
    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    held = [block(alive_node(address), CPU * free.get(address, 0)) for address in addresses]
    report = Report("", "", 0, "", 0.0)

    def observe(event: Any) -> None:
        if isinstance(event, JobEvent):
            report.events.append(asdict(event))
            if event.kind in ("start", "lost", "restart"):
                while held:  # the job has started; from now on it may be placed elsewhere
                    remove_placement_group(held.pop())
        elif isinstance(event, Count):
            report.counts.setdefault(event.worker, []).append(event.number)

    result = build(case, name, folder, near, far).submit("faults", log_dir=folder / "logs", observers=[observe])
    report.status = result.status
    report.error = result.error
    report.attempt = result.attempt
    report.run_id = result.run_id
    with contextlib.suppress(OSError):  # the job ended before the fault
        report.seconds = time.time() - (folder / "struck").stat().st_mtime
        report.before = json.loads((folder / "before.json").read_text())
        after = json.loads((folder / "after.json").read_text())
        report.answer, report.after = after["answer"], after["places"]
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=1))
    return result.exit_code


if __name__ == "__main__":
    import fault_job  # pickled classes must belong to this module, which the workers import, and not to __main__

    sys.exit(fault_job.main(*sys.argv[1:]))
