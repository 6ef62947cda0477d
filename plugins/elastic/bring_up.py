"""Start and removal of single engines beside the processes of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from core import Role
from core.errors import first_line
from core.plan import ProcessPlan
from core.supervise.bring_up import BringUp, Stages
from core.supervise.control import Status
from core.supervise.watch import WatchedProcess, member_of
from core.supervise.worker_process import IDLE, CallKey, KeptCall

AWAY_AFTER_S = 10.0
"""Seconds without room for a lost engine, after which other engines take its calls."""
WEIGHTS = "receive_weights"
"""Method of an engine that is not repeated in one that joins: the version may be gone. The engine requests it."""
_STATUSES = 2
"""Number of new status replies that show that a process has handled all earlier messages. The first reply may belong to
an earlier request."""


class Removal:
    """State of an engine that is being removed: it finishes its calls, while new ones go to another engine.

    Args:
        engine: process of the engine.
        callers: processes that call engines.
    """

    def __init__(self, engine: WatchedProcess, callers: list[WatchedProcess]) -> None:
        self._engine = engine
        self._waits_for = dict.fromkeys((engine, *callers), _STATUSES)
        self._last: dict[WatchedProcess, Status | None] = {p: p.link and p.link.status for p in self._waits_for}

    def is_finished(self) -> bool:
        """True if no caller can send the engine a call any more, and it is idle."""
        for process, last in self._last.items():
            if process.link is not None and process.link.status is not last:
                self._last[process] = process.link.status
                self._waits_for[process] -= 1
        link = self._engine.link
        is_idle = link is None or not link.alive or link.status.doing == IDLE
        return is_idle and all(count <= 0 for process, count in self._waits_for.items() if not process.lost)


class ElasticBringUp(BringUp):
    """Starts the processes of an attempt, and later adds engines and removes them."""

    def __init__(self, *arguments: Any) -> None:
        self._joining: set[WatchedProcess] = set()
        self._away: set[WatchedProcess] = set()
        self._removals: dict[WatchedProcess, Removal] = {}
        self._failed: list[WatchedProcess] = []
        super().__init__(*arguments)

    def engines(self) -> list[WatchedProcess]:
        """Return the processes of the engines, without those that are being removed."""
        return [p for p in self._watch.processes if p.plan.roles == [Role.ROLLOUT] and p not in self._removals]

    def living(self) -> list[WatchedProcess]:
        """Return the engines that have started and are not lost."""
        return [p for p in self.engines() if not p.lost and p not in self._coming]

    def has_started(self, process: WatchedProcess) -> bool:
        """True if a process is not starting."""
        return process not in self._coming

    @property
    def have_all_started(self) -> bool:
        """True if no process is starting, except engines that have no node."""
        return self._coming.keys() <= self._away

    @property
    def can_join(self) -> bool:
        """True if the engines of the start have loaded the model, so that an additional one can do the same."""
        return bool(self.roles) and any(key[2] == "load" for p in self.living() for key in p.calls)

    @property
    def is_joining(self) -> bool:
        """True if an additional engine is starting. One without a node does not count."""
        return bool(self._joining - self._away)

    @property
    def away(self) -> list[WatchedProcess]:
        """Engines that have no node. Others do their work."""
        return [p for p in self.engines() if p in self._away]

    @property
    def is_removing(self) -> bool:
        """True if an engine is being removed."""
        return bool(self._removals)

    def next_rank(self) -> int:
        """Return the rank of the next additional engine. The ranks of removed engines are not used again."""
        return len(self.roles[Role.ROLLOUT].members)

    def add(self, plan: ProcessPlan) -> None:
        """Start an additional engine, whose resources are reserved."""
        process = WatchedProcess(plan, expendable=True, replaces=True)
        ((role, rank),) = plan.workers
        self._local[Role(role), rank] = (0, 1)
        self._watch.processes.append(process)
        self._joining.add(process)
        self._begin(process)

    def remove(self, process: WatchedProcess) -> None:
        """Remove an engine: another one takes its calls, and it ends when it has finished those that it has."""
        self._give_calls_to_another(process)
        self._removals[process] = Removal(process, [p for p in self._watch.processes if p.drives])

    def finish_removals(self, end: Callable[[WatchedProcess], None], free: Callable[[int], None]) -> None:
        """End the engines that have finished their calls."""
        for process, removal in list(self._removals.items()):
            if process.lost or removal.is_finished():
                self.drop(process, end, free)
                self._watch.info(f"{process.plan.name} has left: {len(self.living())} engines")

    def drop_failed(self, end: Callable[[WatchedProcess], None], free: Callable[[int], None]) -> list[tuple[str, str]]:
        """End the additional engines that could not start. Return the name and the error of each of them."""
        failed, self._failed = self._failed, []
        for process in failed:
            self.drop(process, end, free)
        return [(process.plan.name, process.lost) for process in failed]

    def drop(self, process: WatchedProcess, end: Callable[[WatchedProcess], None], free: Callable[[int], None]) -> None:
        """End an engine that has no calls, and release its resources."""
        end(process)
        free(process.plan.bundle)
        self._removals.pop(process, None)
        self._coming.pop(process, None)
        self._joining.discard(process)
        self._away.discard(process)
        self._watch.processes.remove(process)

    def _give_calls_to_another(self, process: WatchedProcess) -> None:
        ((_, rank),) = process.plan.workers
        other = next(p for p in self.living() if p is not process)
        member = member_of(other, Role.ROLLOUT, other.plan.workers[0][1])
        members = self.roles[Role.ROLLOUT].members
        if rank < len(members):
            members[rank] = member
            self._stored = None
            self._emit_to_others(process, "replaced", self._backend.pickled(member), rank)

    # --- methods of BringUp

    def _ask(self, process: WatchedProcess, method: str, *args: Any) -> Any:
        if method == "repeat" and process in self._joining:
            # Kept: the replacement of this engine repeats them too.
            process.calls = calls_of_another(process, self._watch.processes)
            return super()._ask(process, method, process.calls)
        return super()._ask(process, method, *args)

    def _advance(self, process: WatchedProcess, stages: Stages) -> None:
        try:
            super()._advance(process, stages)
        except Exception as error:
            # The run does not need it. Its node may lack the model, for example.
            if not self._is_additional(process):
                raise
            process.lose(first_line(error))

    def _is_additional(self, process: WatchedProcess) -> bool:
        return process in self._joining and process not in self._away

    def _announce(self, process: WatchedProcess) -> None:
        if process not in self._joining:
            super()._announce(process)
            return
        self._joining.discard(process)
        self._away.discard(process)
        ((name, rank),) = process.plan.workers
        member = member_of(process, Role(name), rank)
        self.roles[member.role].members[rank : rank + 1] = [member]
        self._emit_to_others(process, "replaced", self._backend.pickled(member), rank)
        self._stored = None
        self._watch.info(f"{process.plan.name} has joined: {len(self.living()) + 1} engines")

    def start_again(self, process: WatchedProcess, end: Callable[[WatchedProcess], None]) -> None:
        """Start the replacement of a lost process, unless it is being removed or has never joined."""
        if self._is_additional(process):
            if process not in self._failed:
                self._failed.append(process)
        elif process not in self._removals:  # its calls have been given to another one
            super().start_again(process, end)

    def late(self, limit: float) -> list[tuple[WatchedProcess, str]]:
        """See `BringUp.late`. An engine without a node is not late."""
        return [(process, why) for process, why in super().late(limit) if process not in self._away]

    def _check_room(self, waiting: list[WatchedProcess]) -> None:
        engines = [p for p in waiting if p in self.engines() and p not in self._away]
        for process in engines:
            if time.monotonic() - process.started <= AWAY_AFTER_S:
                continue
            if self._is_additional(process):
                if not self._backend.is_reserved(process.plan.bundle):
                    process.lose("its node has left the cluster")
            elif process.replaces and self.living() and self._backend.room_missing():
                self._away.add(process)
                self._joining.add(process)
                self._give_calls_to_another(process)
                name = process.plan.name
                self._watch.info(f"{name} has no node; the other engines do its work until a node joins the cluster")
        super()._check_room([process for process in waiting if process not in self._away])

    def _count(self, role: str, process: WatchedProcess, cause: str) -> None:
        self.look_at_nodes()
        # Nodes may leave any number of times.
        if role != Role.ROLLOUT or process.report is None or process.report.node not in self._dead_nodes:
            super()._count(role, process, cause)


def calls_of_another(process: WatchedProcess, processes: list[WatchedProcess]) -> dict[CallKey, KeptCall]:
    """Return the calls that an engine repeats when it joins, from an engine that has loaded the model.

    Args:
        process: engine that joins.
        processes: processes of the run. All other engines may be lost at this moment.
    """
    ((_, rank),) = process.plan.workers
    engines = [other for other in processes if other.plan.roles == [Role.ROLLOUT]]
    calls = next(other.calls for other in engines if any(method == "load" for _, _, method in other.calls))
    ordered = sorted(calls.items(), key=lambda item: item[1])
    # Attempt 0 orders them before the calls that the engine receives itself.
    return {
        (role, rank, method): (0, number, pickled)
        for number, ((role, _, method), (_, _, pickled)) in enumerate(ordered)
        if method != WEIGHTS
    }
