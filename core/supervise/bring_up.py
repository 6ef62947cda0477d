"""Start of the processes of a job: all of them at first, and later single replacements of lost processes.

The start of a process is a generator with several stages, which yields the references that it waits for. So any number
of processes start concurrently, and a process that dies during its start is started again while the others continue.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from core.errors import WorkerDied, with_note
from core.members import RoleEntry
from core.plan import JobSpec
from core.roles import Role
from core.supervise.control import ControlLink
from core.supervise.watch import Watch, WatchedProcess, directory_of, local_ranks, member_of
from core.supervise.worker_process import Made, ProcessSpec, RunFacts

_FIRST_REPORT_S = 10.0
_TOGETHER_S = 5.0
"""Seconds within which lost processes count as one incident, because a dead node loses all of its processes."""
_NODE_S = 60.0
"""Seconds after a node's death during which a replacement that never started may have been placed on that node."""

Stages = Generator[Any, Any, None]


class BringUp:
    """Starts the processes of one attempt, and maintains the directory of workers.

    Args:
        job: the job.
        facts: data that all processes of the run receive.
        backend: the backend that runs the processes.
        watch: holder of the state of each process.
        starts: number of starts of each process in earlier attempts. It is incremented here.
    """

    def __init__(self, job: JobSpec, facts: RunFacts, backend: Any, watch: Watch, starts: Counter[str]) -> None:
        self._job = job
        self._facts = facts
        self._backend = backend
        self._watch = watch
        self._starts = starts
        # Number of incidents of each role, and the time of the last one.
        self._incidents: dict[str, tuple[int, float]] = {}
        self._coming: dict[WatchedProcess, Stages] = {}
        self._report_at = _FIRST_REPORT_S
        self._node_died_at = -math.inf
        self._dead_nodes: set[str] = backend.dead_nodes()
        self._local: dict[tuple[Role, int], tuple[int, int]] = {}
        self._rendezvous: dict[Role, tuple[str, int]] = {}
        # Devices of each bundle in which one process has reserved them for all processes.
        self._devices: dict[int, list[str]] = {}
        # Reference to the current directory, stored once for all processes. None if the directory has changed.
        self._stored: Any = None
        self.roles: dict[Role, RoleEntry] = {}
        for plan in job.placement.hosts:
            drives = Role.TRAINER in plan.roles
            runs = all(job.roles[role].kind == "run" for role in plan.roles) and not drives
            watch.processes.append(WatchedProcess(plan, expendable=runs and facts.recovers, drives=drives))
        # Processes that have not reached a stage yet. The others wait for them before they continue.
        self._unreported = set(watch.processes)
        self._unmade = set(watch.processes)
        for process in watch.processes:
            self._begin(process)

    @property
    def have_all_started(self) -> bool:
        """True if no process is starting."""
        return not self._coming

    def _begin(self, process: WatchedProcess) -> None:
        name = process.plan.name
        process.attempt = self._starts[name] = self._starts.get(name, 0) + 1
        process.report = process.link = None
        process.fault = process.lost = ""
        process.started = time.monotonic()
        roles = {role: self._job.roles[role] for role in process.plan.roles}
        spec = ProcessSpec(self._facts, process.plan, roles, self._job.global_env | process.plan.env, process.attempt)
        process.log_file = spec.log_file
        process.handle = self._backend.create(spec)
        self._coming[process] = stages = self._stages(process)
        process.reference = next(stages)

    def _ask(self, process: WatchedProcess, method: str, *args: Any) -> Any:
        return self._backend.invoke(process.handle, method, *args)

    # --- the stages of one

    def _stages(self, process: WatchedProcess) -> Stages:
        """Run the start of one process, from the request for its report until it can be called."""
        process.report = yield self._ask(process, "report")
        assert process.report is not None
        if process.report.control is not None:
            try:
                process.link = ControlLink(process.report.control, self._facts.key)
            except (OSError, EOFError) as error:
                process.lose(f"its control channel at {process.report.control}: {error!r}; is the port open?")
                yield
        self._unreported.discard(process)
        if process.drives and not process.plan.shown:  # else a module might read CUDA_VISIBLE_DEVICES before it is set
            # The trainer is constructed after all other workloads, so it imports its modules while it waits.
            yield self._ask(process, "import_classes")
        while self._unreported:
            yield
        if not self.roles:
            self._introduce()
        if process.drives:
            # The constructor of a trainer needs the exports of all other roles.
            while not all(other.drives for other in self._unmade):
                yield
            yield self._ask(process, "connect", self._directory())
        local = {(Role(role), rank): self._local[Role(role), rank] for role, rank in process.plan.workers}
        devices = self._devices.get(process.plan.bundle, [])
        shown = [device for index, device in enumerate(devices) if index in process.plan.shown]
        self._note((yield self._ask(process, "construct", self._rendezvous, local, shown)))
        self._unmade.discard(process)
        while self._unmade:
            yield
        if not process.drives:
            yield self._ask(process, "connect", self._directory())
        if process.replaces:
            yield self._ask(process, "repeat", process.calls)
            for role, rank in process.plan.workers:
                if self.roles[Role(role)].has_run and any(other.drives for other in self._watch.processes):
                    yield self._ask(process, "start_run", Role(role), rank)
            self._announce(process)

    def _introduce(self) -> None:
        """Build the directory, the local ranks and the rendezvous addresses from the reports of all processes."""
        processes = self._watch.processes
        self.roles = directory_of(self._job.roles, processes)
        self._local = local_ranks(processes)
        for process in processes:
            assert process.report is not None
            self._rendezvous |= {role: (process.report.ip, port) for role, port in process.report.ports.items()}
            if process.plan.accelerator > 1:
                self._devices[process.plan.bundle] = process.report.devices

    def _note(self, made: dict[Role, Made]) -> None:
        for role, workload in made.items():
            self.roles[role] = replace(self.roles[role], **vars(workload))
        self._stored = None

    def _directory(self) -> Any:
        if self._stored is None:
            self._stored = self._backend.transport.put(self.roles)
        return self._stored

    def _announce(self, process: WatchedProcess) -> None:
        for role, rank in process.plan.workers:
            member = member_of(process, Role(role), rank)
            self.roles[member.role].members[rank] = member
            self._emit_to_others(process, "replaced", self._backend.pickled(member), rank)
        self._stored = None
        self._watch.event("replaced", process.plan.name, f"attempt {process.attempt}")

    def _emit_to_others(self, process: WatchedProcess, kind: str, *details: Any) -> None:
        for other in self._watch.processes:
            if other is not process and not other.lost:
                other.send(kind, *details)

    # --- going on

    def advance(self, timeout: float) -> None:
        """Advance all starting processes whose references become ready within `timeout` seconds.

        Raises:
            BaseException: an error of a workload's class during its import, construction or set-up.
        """
        references = [process.reference for process in self._coming if process.reference is not None]
        # Waking up for every single process would take as long as all of them together.
        ready = {None, *self._backend.transport.wait(references, timeout, len(references))}
        for process in list(self._coming):
            if not process.lost and process.reference in ready:
                self._advance(process, self._coming[process])
        self._check_room([process for process in self._coming if process.report is None and not process.lost])

    def _advance(self, process: WatchedProcess, stages: Stages) -> None:
        value = None
        if process.reference is not None:
            outcome = self._backend.transport.outcome(process.reference)
            if isinstance(outcome.error, WorkerDied) and not outcome.raised:
                process.lose(str(outcome.error))
                return
            if outcome.error is not None:
                raise with_note(outcome.error, f"in {process.plan.name}")
            value = outcome.value
        try:
            process.reference = stages.send(value)
        except StopIteration:
            del self._coming[process]

    def _check_room(self, waiting: list[WatchedProcess]) -> None:
        """Report processes that have not started for a long time, and the resources that they wait for.

        Raises:
            WorkerDied: they have waited for resources longer than `placement_timeout`.
        """
        waited = time.monotonic() - min((process.started for process in waiting), default=math.inf)
        if waited < _FIRST_REPORT_S:
            self._report_at = _FIRST_REPORT_S
        if waited < self._report_at:
            return
        missing = self._backend.room_missing()
        limit = self._job.placement_timeout
        # The next report is at the limit if the limit is closer than twice the elapsed time, so the failure is not
        # late.
        self._report_at = limit if waited < limit < 2 * waited else 2 * waited
        names = ", ".join(process.plan.name for process in waiting[:3])
        if len(waiting) > 3:
            names += ", ..."
        if missing and waited >= limit:
            raise WorkerDied(f"{names} could not be started within placement_timeout={limit:g} s: {missing}")
        reason = missing or "their resources are reserved"
        self._watch.info(f"{len(waiting)} processes have not started after {waited:.0f} s: {names}; {reason}")

    # --- lost processes

    def late(self, limit: float) -> list[tuple[WatchedProcess, str]]:
        """Return the processes without a control channel `limit` seconds after their start, with the evidence."""
        silent = [process for process in self._coming if process.link is None and not process.lost]
        return [(p, f"not up after {limit:g} s") for p in silent if time.monotonic() - p.started > limit]

    def look_at_nodes(self) -> None:
        """Mark all processes on dead nodes as lost. The death of a node does not always close its connections."""
        dead = self._backend.dead_nodes()
        if dead - self._dead_nodes:
            self._dead_nodes = dead
            self._node_died_at = time.monotonic()
        for process in self._watch.processes:
            if process.report is not None and process.report.node in dead:
                process.lose("its machine is dead")

    def start_again(self, process: WatchedProcess, end: Callable[[WatchedProcess], None]) -> None:
        """Start the replacement of a lost process.

        Raises:
            WorkerDied: one of its roles has exceeded its `max_restarts`.
        """
        cause = process.blame()
        self._watch.event("lost", process.plan.name, cause)
        for role, rank in process.plan.workers:
            self._emit_to_others(process, "lost", role, rank)
        if self._unmade:
            self._unmade.add(process)
            if not self.roles:
                self._unreported.add(process)
        for role in process.plan.roles:
            self._count(role, process, cause)
        self._watch.info(f"{cause}; it is started again")
        end(process)
        process.replaces = True
        self._begin(process)

    def _count(self, role: str, process: WatchedProcess, cause: str) -> None:
        now = time.monotonic()
        limit = self._job.roles[role].max_restarts
        incidents, began = self._incidents.get(role, (0, -math.inf))
        if process.report is None:
            self.look_at_nodes()
        together = process.started < began and now - began < _TOGETHER_S
        by_the_node = process.report is None and now - self._node_died_at < _NODE_S
        if together or by_the_node:
            return
        if incidents >= limit:
            raise WorkerDied(f"{cause}; {role} has already lost instances {limit} times (max_restarts={limit})")
        self._incidents[role] = (incidents + 1, now)
