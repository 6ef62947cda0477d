"""Monitoring of a job's processes by the master: messages, status, memory, dead and hung processes."""

import contextlib
import logging
import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.members import Member, RoleEntry
from core.observers import JobEvent, MemoryEvent, Observer
from core.plan import ProcessPlan, RoleSpec
from core.roles import Role
from core.shared_memory import machine_id
from core.supervise.control import ControlLink, MemoryGauge
from core.supervise.worker_process import IDLE, STARTING, CallKey, KeptCall, ProcessReport

_log = logging.getLogger("troupe")

_STATUS_EVERY_S = 2.0
_MEMORY_EVERY_S = 10.0
_SILENT_S = 5.0
_STACK_WITHIN_S = 2.0
_TAIL_LINES = 20


@dataclass(eq=False)
class WatchedProcess:
    """State of one process of the job. A replacement reuses the object of the lost process."""

    plan: ProcessPlan
    expendable: bool
    """True if the process is replaced when it dies. The death of any other process ends the attempt."""
    drives: bool = False
    """True if the process holds the trainer."""
    replaces: bool = False
    """True if the process replaces one that was lost during this attempt."""
    handle: Any = None
    reference: Any = None
    """Reference that the start of the process waits for. None if it waits for other processes."""
    attempt: int = 0
    started: float = 0.0
    log_file: Path | None = None
    report: ProcessReport | None = None
    link: ControlLink | None = None
    fault: str = ""
    """Reason for which the master killed the process. Empty if it died by itself."""
    calls: dict[CallKey, KeptCall] = field(default_factory=dict)
    """Last call of each method with replay="last", to be repeated in a replacement."""
    lost: str = ""
    """Evidence of the process's death, empty while it is alive. This field alone decides that a process is lost."""

    @property
    def roles(self) -> str:
        """Roles of the workers, such as `ACTOR` or `ACTOR+ROLLOUT`."""
        return "+".join(self.plan.roles)

    @property
    def is_local(self) -> bool:
        """True if the process is on this machine, so that it can be sent signals."""
        return self.report is not None and self.report.machine == machine_id()

    def send(self, kind: str, *details: Any) -> None:
        """Send the process a message if it has a control channel."""
        if self.link is not None:
            self.link.send(kind, *details)

    def signal(self, number: int) -> None:
        """Send the process a signal if it is alive and on this machine."""
        if self.report and self.is_local and self.link and self.link.alive:
            with contextlib.suppress(OSError):
                os.kill(self.report.pid, number)

    def lose(self, evidence: str) -> None:
        """Mark the process as dead or unreachable. Only the evidence of the first call is kept."""
        # Later evidence is mostly a consequence, such as a closed connection after a kill.
        self.lost = self.lost or evidence

    def blame(self) -> str:
        """Return one line about the end of the process."""
        if self.report is None or self.link is None:
            return f"{self.plan.name} died before it was up ({self.lost})"
        name = f"{self.plan.name} (process {self.report.pid} on {self.report.ip})"
        log = f"; its output: {self.log_file}" if self.log_file else ""
        if self.fault:
            return f"{name} hung and was killed: {self.fault}{log}"
        status = self.link.status
        seconds = status.seconds + time.monotonic() - self.link.seen
        return f"{name} died: {self.lost}; last seen {status.doing} for {seconds:.0f} s{log}"

    def last_lines(self) -> str:
        """Return the last lines of the process's log, or an empty string if the log is on another machine."""
        if self.log_file is None:
            return ""
        with contextlib.suppress(OSError):
            lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join(lines[-_TAIL_LINES:])
        return ""


class Watch:
    """Receives the messages of all processes. Messages for neither terminal nor observers are kept in `messages`.

    Args:
        observers: callbacks for events.
        info: callback that shows one line at the terminal.
        in_this_process: True if the job runs in this process, so that the memory of its children is the job's. Else
            the children are Ray's own processes, which are not counted.
    """

    def __init__(self, observers: list[Observer], info: Callable[[str], None], in_this_process: bool = False) -> None:
        self.processes: list[WatchedProcess] = []
        self.messages: defaultdict[str, list[Any]] = defaultdict(list)
        self.peak_memory = 0
        self._observers = observers
        self.info = info
        self._next_status = 0.0
        self._next_memory = time.monotonic() + _STATUS_EVERY_S
        self._last_sign = time.monotonic()
        self._memory = MemoryGauge(descendants=in_this_process)

    def event(self, kind: str, name: str = "", text: str = "") -> None:
        """Send a JobEvent to the observers."""
        self._last_sign = time.monotonic()
        self._tell(JobEvent(kind, time.time(), name, text))

    def _tell(self, event: Any) -> None:
        """Send an event to all observers. An observer that raises is removed with a warning."""
        # A copy of the list, because an observer that raises is removed during the loop.
        for observer in list(self._observers):
            try:
                observer(event)
            except Exception:  # noqa: BLE001 - an observer is user code, whose errors must not stop the run
                self._observers.remove(observer)
                _log.warning("observer %r raised an error and is removed", observer, exc_info=True)

    def poll(self) -> None:
        """Process the messages of all processes, detect closed connections, and request the status periodically."""
        linked = [(process, process.link) for process in self.processes if process.link is not None]
        for process, link in linked:
            for kind, payload in link.poll():
                if kind == "kept":
                    key, process.calls[key] = payload
                else:
                    self.take_in(kind, payload)
            # Messages first: the connection may hold some that were sent before the process died.
            if not link.alive:
                process.lose("killed, out of memory, or crashed")
        if time.monotonic() >= self._next_status:
            self._next_status = time.monotonic() + _STATUS_EVERY_S
            memory = {"DRIVER": self._memory.read()}
            alive = [(process, link) for process, link in linked if link.alive]
            for process, link in alive:
                memory[process.roles] = memory.get(process.roles, 0) + link.status.memory_bytes
            total = sum(memory.values())
            self.peak_memory = max(self.peak_memory, total)
            if time.monotonic() >= self._next_memory:
                self._next_memory = time.monotonic() + _MEMORY_EVERY_S
                self._tell(MemoryEvent(time.time(), memory))
            for _, link in alive:
                link.send("status", total)

    def silent(self) -> list[WatchedProcess]:
        """Return the processes that have sent nothing for a while. A dead machine may leave connections open."""
        return [p for p in self.processes if p.link and p.link.alive and p.link.silent_for > _SILENT_S]

    def on_event(self, kind: str, payload: Any) -> None:
        """Process a message of a workload in this process, which has no control channel."""
        self.take_in(kind, payload)
        self.poll()

    def take_in(self, kind: str, payload: Any) -> None:
        """Show an "info" line, send an "event" to the observers, or keep any other message for `take`."""
        handlers = {"info": self.info, "event": self._tell}
        if kind not in handlers:
            self.messages[kind].append(payload)
            return
        self._last_sign = time.monotonic()
        handlers[kind](payload)

    def take(self, kind: str) -> list[Any]:
        """Return and remove the kept messages of a kind."""
        return self.messages.pop(kind, [])

    def stalled(
        self, limit: float, driving: Collection[WatchedProcess], have_all_started: bool
    ) -> list[tuple[WatchedProcess, str]]:
        """Return the processes without progress for `limit` seconds, with the evidence.

        They are the processes that do not respond, or that are in one call without a beat. If there are none, they are
        the processes that drive the job, provided that all other processes are idle.
        """
        hung: list[tuple[WatchedProcess, str]] = []
        alive = [(p, p.link) for p in self.processes if p.link is not None and p.link.alive]
        # Ranks wait for each other in collectives, so the progress of one rank counts for all ranks of its role.
        ranks: dict[str, float] = {}
        for process, link in alive:
            if not process.expendable:
                ranks[process.roles] = min(link.status.quiet, ranks.get(process.roles, math.inf))
        for process, link in alive:
            quiet = ranks.get(process.roles, link.status.quiet)
            if link.silent_for > limit:
                hung.append((process, f"it has not responded for {link.silent_for:.0f} s"))
            # A driving workload waits for others most of the time, so a long call of it is no evidence.
            elif process not in driving and link.status.doing not in (IDLE, STARTING) and quiet > limit:
                seconds = link.status.seconds
                hung.append((process, f"in {link.status.doing} for {seconds:.0f} s, {quiet:.0f} s without progress"))
        quiet = time.monotonic() - self._last_sign
        # A process that has just stopped responding may have reported "idle" long ago, so an old status does not count.
        fresh = limit / 2
        idle = all(p in driving or (link.status.doing == IDLE and link.silent_for < fresh) for p, link in alive)
        if not hung and quiet > limit and idle and have_all_started:
            hung = [
                (process, f"in {link.status.doing}, without a call to any worker for {quiet:.0f} s")
                for process, link in alive
                if process in driving and link.status.quiet > limit
            ]
        return hung

    def ask(self, kind: str, processes: Sequence[WatchedProcess], within: float) -> list[Any]:
        """Send a message to processes, and return the replies within some seconds. Lost processes are not awaited."""
        for process in processes:
            process.send(kind)
        deadline = time.monotonic() + within
        answers: list[Any] = []
        while len(answers) < sum(not process.lost for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
            self.poll()
            answers += self.take(kind)
        return answers

    def stack(self, process: WatchedProcess) -> str:
        """Return the main thread's stack, or an empty string. The stacks of all threads go to the process's log."""
        stack = "".join(self.ask("stack", [process], _STACK_WITHIN_S))
        if not stack:
            # The process may hold Python's interpreter lock. The handler of SIGUSR1 does not need it.
            process.signal(signal.SIGUSR1)
            time.sleep(0.2)
        return stack


def member_of(process: WatchedProcess, role: Role, rank: int) -> Member:
    """Return the member of a worker."""
    return Member(role, rank, process.handle, process.attempt, role if len(process.plan.workers) > 1 else "")


def directory_of(roles: Mapping[str, RoleSpec], processes: Sequence[WatchedProcess]) -> dict[Role, RoleEntry]:
    """Return the entry of each role. The exports are empty, because they are known only after construction."""
    directory: dict[Role, RoleEntry] = {}
    for name, spec in roles.items():
        role = Role(name)
        members = {rank: process for process in processes for other, rank in process.plan.workers if other == name}
        directory[role] = RoleEntry(
            kind=spec.kind,
            members=[member_of(members[rank], role, rank) for rank in range(spec.total)],
            resource=spec.resource.model_dump(exclude={"custom", "threads"}) | spec.resource.custom,
        )
    return directory


def local_ranks(processes: Sequence[WatchedProcess]) -> dict[tuple[Role, int], tuple[int, int]]:
    """Return (local rank, local world size) of each worker, from the nodes on which the processes were placed."""
    by_node: dict[tuple[str, str], list[int]] = {}
    for process in processes:
        assert process.report is not None
        for role, rank in process.plan.workers:
            by_node.setdefault((role, process.report.node), []).append(rank)
    return {
        (Role(role), rank): (position, len(ranks))
        for (role, _), ranks in by_node.items()
        for position, rank in enumerate(sorted(ranks))
    }
