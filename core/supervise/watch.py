"""What the master sees of a job's processes: what they say and do, who is gone, who hangs."""

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
    """One process of the job; replaced in place, so that its place in the job stays what it is."""

    plan: ProcessPlan
    expendable: bool
    """Whether it is replaced when it dies; the death of the others ends the attempt."""
    drives: bool = False
    """Whether it holds the trainer."""
    replaces: bool = False
    """Whether it stands in for one that was lost since all were started."""
    handle: Any = None
    reference: Any = None
    """What it waits for on its way up; None: for the others."""
    attempt: int = 0
    started: float = 0.0
    log_file: Path | None = None
    report: ProcessReport | None = None
    link: ControlLink | None = None
    fault: str = ""
    """Why it was ended, if it did not die by itself."""
    calls: dict[CallKey, KeptCall] = field(default_factory=dict)
    """The last of each method that is to be repeated in its replacement."""
    lost: str = ""
    """How its end became known; empty while it lives. Whoever finds out says it here, and nothing else counts."""

    @property
    def roles(self) -> str:
        """Of its workers: `ACTOR`, or `ACTOR+ROLLOUT`."""
        return "+".join(self.plan.roles)

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine, so that signals reach it."""
        return self.report is not None and self.report.machine == machine_id()

    def send(self, kind: str, *details: Any) -> None:
        """Send it a message, once it can be reached."""
        if self.link is not None:
            self.link.send(kind, *details)

    def signal(self, number: int) -> None:
        """Send it a signal, if it lives and does so on this machine."""
        if self.report and self.is_here and self.link and self.link.alive:
            with contextlib.suppress(OSError):
                os.kill(self.report.pid, number)

    def lose(self, how: str) -> None:
        """It is gone, or nobody can reach it any more, which comes to the same; the first to say so is believed."""
        self.lost = self.lost or how

    def blame(self) -> str:
        """One line about its end."""
        if self.report is None or self.link is None:
            return f"{self.plan.name} died before it was up ({self.lost})"
        who = f"{self.plan.name} (process {self.report.pid} on {self.report.ip})"
        where = f"; its output: {self.log_file}" if self.log_file else ""
        if self.fault:
            return f"{who} hung and was ended: {self.fault}{where}"
        status = self.link.status
        seconds = status.seconds + time.monotonic() - self.link.seen
        return f"{who} died: {self.lost}; last seen {status.doing} for {seconds:.0f} s{where}"

    def last_lines(self) -> str:
        """The end of what it wrote, where its log is on this machine."""
        if self.log_file is None:
            return ""
        with contextlib.suppress(OSError):
            lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join(lines[-_TAIL_LINES:])
        return ""


class Watch:
    """Hears all processes. What is not for the terminal or the observers is kept in `messages`.

    `in_this_process`: the job is; else the children of this process are Ray's own, whose memory is not the job's.
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
        """Tell the observers of something that happened to the job."""
        self._last_sign = time.monotonic()
        self._tell(JobEvent(kind, time.time(), name, text))

    def _tell(self, event: Any) -> None:
        """Pass an event to all observers. One that raises is dropped with a warning: watching never stops a run."""
        for observer in list(self._observers):
            try:
                observer(event)
            except Exception:  # noqa: BLE001 - an observer is user code
                self._observers.remove(observer)
                _log.warning("observer %r failed and is switched off", observer, exc_info=True)

    def poll(self) -> None:
        """Show what the processes said, notice whose connection has ended, and keep their status fresh."""
        linked = [(process, process.link) for process in self.processes if process.link is not None]
        for process, link in linked:
            for kind, payload in link.poll():
                if kind == "kept":
                    key, process.calls[key] = payload
                else:
                    self.take_in(kind, payload)
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
        """Processes that have not answered for a while: perhaps their machine is gone, which closes no connection."""
        return [
            process
            for process in self.processes
            if process.link and process.link.alive and process.link.silent_for > _SILENT_S
        ]

    def on_event(self, kind: str, payload: Any) -> None:
        """Take a message of a workload in this process, which no poll will bring."""
        self.take_in(kind, payload)
        self.poll()

    def take_in(self, kind: str, payload: Any) -> None:
        """Show a line, pass an event on, keep every other message for who asks for it."""
        if kind not in ("info", "event"):
            self.messages[kind].append(payload)
            return
        self._last_sign = time.monotonic()
        self.info(payload) if kind == "info" else self._tell(payload)

    def take(self, kind: str) -> list[Any]:
        """The messages of a kind, which are then gone."""
        return self.messages.pop(kind, [])

    def stalled(
        self, limit: float, driving: Collection[WatchedProcess], all_up: bool
    ) -> list[tuple[WatchedProcess, str]]:
        """Processes without a sign of progress for `limit` seconds, with what tells so.

        A process that answers nothing, or is in one call and has not beaten for so long. Only when there is none: who
        drives the job, if nobody does anything for it.
        """
        now, found = time.monotonic(), list[tuple[WatchedProcess, str]]()
        alive = [
            (process, process.link) for process in self.processes if process.link is not None and process.link.alive
        ]
        # Ranks wait for each other: one that makes progress does so for all.
        ranks: dict[str, float] = {}
        for process, link in alive:
            if not process.expendable:
                ranks[process.roles] = min(link.status.quiet, ranks.get(process.roles, math.inf))
        for process, link in alive:
            quiet = ranks.get(process.roles, link.status.quiet)
            if link.silent_for > limit:
                found.append((process, f"it has not responded for {link.silent_for:.0f} s"))
            elif process not in driving and link.status.doing not in (IDLE, STARTING) and quiet > limit:
                seconds = link.status.seconds
                found.append((process, f"in {link.status.doing} for {seconds:.0f} s, {quiet:.0f} s without progress"))
        quiet = now - self._last_sign
        # What a process that has just stopped answering said last, that it is idle, may be long untrue.
        known = limit / 2
        idle = all(h in driving or (link.status.doing == IDLE and link.silent_for < known) for h, link in alive)
        if not found and quiet > limit and idle and all_up:
            found = [
                (process, f"in {link.status.doing}, and it has called nobody for {quiet:.0f} s")
                for process, link in alive
                if process in driving and link.status.quiet > limit
            ]
        return found

    def ask(self, kind: str, processes: Sequence[WatchedProcess], within: float) -> list[Any]:
        """What processes answer to a message within so many seconds; the dead are not waited for."""
        for process in processes:
            process.send(kind)
        deadline, answers = time.monotonic() + within, list[Any]()
        while len(answers) < sum(not process.lost for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
            self.poll()
            answers += self.take(kind)
        return answers

    def stack(self, process: WatchedProcess) -> str:
        """Where the process is; its log has all threads. Empty if it cannot tell."""
        found = "".join(self.ask("stack", [process], _STACK_WITHIN_S))
        if not found:
            # It holds Python's lock; the signal's handler needs none.
            process.signal(signal.SIGUSR1)
            time.sleep(0.2)
        return found


def member_of(process: WatchedProcess, role: Role, rank: int) -> Member:
    """A worker as others see it."""
    return Member(role, rank, process.handle, process.attempt, role if len(process.plan.workers) > 1 else "")


def directory_of(roles: Mapping[str, RoleSpec], processes: Sequence[WatchedProcess]) -> dict[Role, RoleEntry]:
    """The workers of each role, as they find each other; what they export is not known yet."""
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
    """(local rank, local world size) of each worker, from the nodes on which the processes really are."""
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
