"""Master of a run whose number of rollout engines changes."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, ClassVar

import ray

from core import Role
from core.plan import ProcessPlan
from core.supervise.bring_up import BringUp
from core.supervise.master import Master
from core.supervise.watch import WatchedProcess
from plugins.elastic.backend import ElasticRay
from plugins.elastic.bring_up import ElasticBringUp
from plugins.elastic.requests import RESIZE, FleetState, discard, take_requests, write_state

_LOOK_EVERY_S = 1.0
_NODES_EVERY_S = 5.0


class ElasticMaster(Master):
    """Master that adds and removes rollout engines, as requests and the nodes of the cluster demand.

    At most one engine starts at a time. The target survives a restart of the job.
    """

    BRING_UP: ClassVar[type[BringUp]] = ElasticBringUp
    _coming: ElasticBringUp
    _backend: ElasticRay

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._backend = ElasticRay(self._run_id)
        config = self._job.config
        self._run_dir = Path(config.run_dir)
        # Those of an earlier run in the same folder, which this run may continue.
        discard(self._run_dir)
        self._most: float = config.elastic.max_engines or math.inf
        self._spreads = config.placement.nodes > 1
        self._target = self._job.roles[Role.ROLLOUT].total
        self._reserving: tuple[ProcessPlan, float, str | None] | None = None
        """Plan of the engine whose resources are being reserved, time of the request, and its new node."""
        self._bundle = len(self._job.placement.bundles)
        self._note = ""
        self._requests = 0
        self._known_nodes: set[str] = set()
        self._new_nodes: list[str] = []
        self._look_at = self._nodes_at = 0.0
        self._written: FleetState | None = None

    def _supervise(self, within: float = 0.0, pause: float = 0.0) -> None:
        super()._supervise(within, pause)
        if not self._ending and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_EVERY_S
            self._resize()

    def _collect(self, calls: list[tuple[WatchedProcess, Any]]) -> None:
        # A call to an engine that waits for a node would be answered only after one has joined, and a call to one that
        # loads its model only after that.
        super()._collect([(process, reference) for process, reference in calls if self._coming.has_started(process)])

    def _end_processes(self) -> None:
        self._reserving = None
        super()._end_processes()

    def _resize(self) -> None:
        """Take the requests, and make one step towards the requested number."""
        coming = self._coming
        for change in take_requests(self._run_dir):
            self._request(self._target + change)
        for number in self._watch.take(RESIZE):
            self._request(int(number))
        coming.finish_removals(self._end, self._backend.free)
        for name, why in coming.drop_failed(self._end, self._backend.free):
            # Another engine on a new node would fail in the same way, again and again.
            self._new_nodes.clear()
            self._give_up(f"{name} could not join: {why}")
        if not coming.can_join:
            return
        self._look_for_nodes()
        number = len(coming.engines())
        if self._reserving is not None:
            self._await_room(*self._reserving)
        elif number < self._target and not coming.is_joining:
            self._reserve(self._node_to_use())
        elif number > self._target and coming.away:
            away = coming.away[-1]
            coming.drop(away, self._end, self._backend.free)
            self._watch.info(f"{away.plan.name}, which had no node, has left")
        elif number > self._target and len(coming.living()) > 1 and not coming.is_removing:
            last = max(coming.living(), key=lambda process: process.plan.workers[0][1])
            self._watch.info(f"{last.plan.name} leaves when it has finished its work")
            coming.remove(last)
        elif self._new_nodes and not coming.is_joining and number < self._most:
            self._reserve(self._new_nodes[0], self._new_nodes[0])
        self._write_state()

    def _request(self, number: int) -> None:
        allowed = int(min(max(number, 1), self._most))
        self._requests += 1
        self._note = ""
        if allowed != number:
            most = self._job.config.elastic.max_engines or "no limit"
            self._note = f"{number} engines were requested; the minimum is 1, the maximum elastic.max_engines={most}"
        self._target = allowed
        self._watch.info(f"{allowed} rollout engines are requested")

    def _reserve(self, node: str | None, new_node: str | None = None) -> None:
        self._bundle += 1
        first = next(host for host in self._job.placement.hosts if host.roles == [Role.ROLLOUT])
        devices = 0.0
        if self._job.device_type == "GPU":
            devices = self._job.roles[Role.ROLLOUT].resource.accelerator
        worker = (str(Role.ROLLOUT), self._coming.next_rank())
        # Devices of its own: it shares none with a rank of the policy.
        changes = {"workers": [worker], "bundle": self._bundle, "accelerator": devices, "shown": []}
        plan = first.model_copy(update=changes)
        self._backend.reserve(plan, node)
        self._reserving = (plan, time.monotonic(), new_node)

    def _await_room(self, plan: ProcessPlan, began: float, new_node: str | None) -> None:
        limit = self._job.placement_timeout
        if new_node:
            limit = _NODES_EVERY_S
        if self._backend.is_reserved(plan.bundle):
            self._reserving = None
            if new_node:
                self._target += 1
            self._coming.add(plan)
        elif time.monotonic() - began > limit:
            self._reserving = None
            self._backend.free(plan.bundle)
            if new_node:  # it has no room for another engine
                self._new_nodes.remove(new_node)
                return
            self._give_up(
                f"no free resources for another engine within placement_timeout={limit:g} s; add nodes to the cluster, "
                "or free resources on it"
            )

    def _give_up(self, note: str) -> None:
        """Continue with the engines that there are."""
        self._target = len(self._coming.engines())
        self._note = note
        self._watch.info(note)

    def _node_to_use(self) -> str | None:
        """Return the node of the policy's rank 0, or None for any node, to which the weights must be served."""
        if self._spreads:
            return None
        reports = [p.report for p in self._watch.processes if (str(Role.ACTOR), 0) in p.plan.workers]
        return next((report.node for report in reports if report is not None), None)

    def _look_for_nodes(self) -> None:
        """Find nodes that have joined the cluster since the start. The first look takes those of the start."""
        if not self._spreads or time.monotonic() < self._nodes_at or self._backend.fault():
            return
        self._nodes_at = time.monotonic() + _NODES_EVERY_S
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if self._known_nodes:
            self._new_nodes += sorted(alive - self._known_nodes)
        self._new_nodes = [node for node in self._new_nodes if node in alive]
        self._known_nodes |= alive

    def _write_state(self) -> None:
        engines = tuple(process.plan.name for process in self._coming.living())
        state = FleetState(self._target, engines, self._note, self._requests)
        if state != self._written:
            self._written = state
            write_state(self._run_dir, state)
