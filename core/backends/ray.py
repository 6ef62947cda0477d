"""Workloads as Ray actors: one plain, single-threaded actor per host, inside one placement group per job."""

import contextlib
import importlib
import logging
import math
import os
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.cloudpickle import cloudpickle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.backends.ray_token import own_token
from core.errors import JobError, WorkerDied, with_note
from core.host import Host, HostReport, HostSpec
from core.inline import Inline, InlineCall, send_inline
from core.invocation import Export
from core.members import Member, Outcome
from core.plan import BundlePlan, HostPlan, Placement
from core.process import HostProcess
from core.roles import Role
from core.shared_memory import shared_folder

_BESIDE_OTHERS = "beside_others"
_NODE_LABEL = "ray.io/node-id"
_MOMENT_S = 0.02
_REACHED_WITHIN_S = 10.0
_SLOTS = 64
"""So many exported methods of a host have a method of the actor each; the others share one."""
OBJECT_STORE_BYTES = 2 * 2**30
"""Upper bound of a local cluster's object store; its memory is taken only as it is used."""


class RayTransport:
    """Calls as actor tasks, outcomes as object references; calls between workloads of one host stay in its process."""

    is_inline = False

    def __init__(self, host: Host | None = None) -> None:
        self.host = host
        self.inline = Inline()

    def send(self, member: Member, export: Export, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Submit one call."""
        if self.host is not None and self.host.holds(member.role, member.rank):
            return send_inline(self.inline, self.host, member, export, args, kwargs)
        if export.concurrent:
            beside = member.handle.beside_others.options(concurrency_group=_BESIDE_OTHERS)
            return beside.remote(export.slot, *args, **kwargs)
        # Ray packs each argument by itself, and an argument more is a tenth of a small call's time.
        if 0 <= export.slot < _SLOTS:
            return getattr(member.handle, f"slot_{export.slot}").remote(*args, **kwargs)
        return member.handle.from_outside.remote(export.slot, *args, **kwargs)

    def put(self, value: Any) -> Any:
        """Store a value once."""
        return ray.put(value)

    def wait(self, references: list[Any], timeout: float | None) -> list[Any]:
        """Those that are ready after at most `timeout` seconds."""
        own = [reference for reference in references if isinstance(reference, InlineCall)]
        if own:
            others = [reference for reference in references if not isinstance(reference, InlineCall)]
            return self.inline.wait(own, timeout) + self.wait(others, 0)
        if not references:
            return []
        wanted = len(references) if timeout == 0 else 1
        ready, _ = ray.wait(references, num_returns=wanted, timeout=timeout)
        return ready

    def values(self, references: list[Any]) -> list[Any] | None:
        """All values in one question to Ray, if they come within a moment."""
        if not all(isinstance(reference, ray.ObjectRef) for reference in references):
            return None
        try:
            return ray.get(references, timeout=_MOMENT_S)
        except Exception:  # noqa: BLE001 - whatever it is, `wait` and `outcome` find out whose
            return None

    def outcome(self, reference: Any) -> Outcome:
        """The value, or the error with its own type and the remote traceback as a note."""
        if isinstance(reference, InlineCall):
            assert reference.outcome is not None
            return reference.outcome
        try:
            return Outcome(ray.get(reference))
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if cause is not error:
                with_note(cause, f"remote traceback:\n{error}")
            return Outcome(error=cause)
        except RayActorError as error:
            return Outcome(error=WorkerDied(f"the worker's process is gone ({type(error).__name__})"))


class RayHost(HostProcess):
    """A host inside an actor."""

    def __init__(self, spec: HostSpec) -> None:
        transport = RayTransport()
        self._inline = transport.inline
        super().__init__(spec, ray.util.get_node_ip_address(), transport)
        transport.host = self

    def prepare(self) -> HostReport:
        """As `HostProcess.prepare`, with Ray's node: several may have one address."""
        report = super().prepare()
        report.node = ray.get_runtime_context().get_node_id()
        return report

    def from_outside(self, slot: int, /, *args: Any, **kwargs: Any) -> Any:
        """As `Host.call_slot`; then what it asked of others in this process without waiting."""
        with self._inline.occupied(self.worker_of(slot)):
            return self.call_slot(slot, *args, **kwargs)

    def run(self, role: Role, rank: int) -> None:
        """As `Host.run`, and the same."""
        with self._inline.occupied((role, rank)):
            super().run(role, rank)

    def beside_others(self, slot: int, /, *args: Any, **kwargs: Any) -> Any:
        """As `Host.call_slot`, on a thread of its own."""
        return self.call_slot(slot, *args, **kwargs)


def _slot(number: int) -> Any:
    def call(self: RayHost, *args: Any, **kwargs: Any) -> Any:
        return self.from_outside(number, *args, **kwargs)

    return call


for _number in range(_SLOTS):
    setattr(RayHost, f"slot_{_number}", _slot(_number))

_SingleThreaded = ray.remote(RayHost)


class RayBackend:
    """Starts and ends what a job needs on Ray; starts a cluster of its own when there is none."""

    is_local = False

    def __init__(self, run_id: str, address: str | None) -> None:
        self._run_id = run_id
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._own_cluster = contextlib.ExitStack()
        self._group: PlacementGroup | None = None
        self.transport = RayTransport()

    def start(self, placement: Placement) -> None:
        """Connect or start Ray, and reserve the job's bundles.

        Raises:
            JobError: nobody answers at the cluster's address, or it has less than the job needs.
        """
        cpus = math.ceil(sum(bundle.cpu for bundle in placement.bundles))
        if not ray.is_initialized():
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if self._address:
                check_reachable(self._address)
                ray.init(address=self._address, **quiet)
            else:
                self._own_cluster.enter_context(own_token(shared_folder(f"{self._run_id}-ray")))
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                # Ray's own choice is 15: whatever else runs on the machine would keep the workers from working.
                os.environ.setdefault("RAY_worker_niceness", "0")
                free = os.statvfs("/dev/shm")
                store = max(100 * 2**20, min(OBJECT_STORE_BYTES, free.f_bavail * free.f_frsize // 3))
                ray.init(
                    address="local",
                    num_cpus=max(cpus, os.cpu_count() or 1),
                    include_dashboard=False,
                    object_store_memory=store,
                    **quiet,
                )
                self._own_cluster.callback(ray.shutdown)
                # Ray prints a paragraph about each process that dies; the master names it in one line.
                vars(importlib.import_module("ray._private.worker"))["print_to_stdstream"] = lambda *_, **__: None
        self._check_capacity(placement, cpus)
        nodes = self._machines(placement)
        where = [{_NODE_LABEL: nodes[bundle.machine]} if bundle.machine else {} for bundle in placement.bundles]
        selected: dict[str, Any] = {"bundle_label_selector": where} if nodes else {}
        bundles = [_ray_resources(bundle) for bundle in placement.bundles]
        self._group = placement_group(bundles, strategy="PACK", name=f"troupe-{self._run_id}", **selected)
        if not self._group.wait(30):
            raise JobError(
                f"the cluster could not reserve the job's {len(bundles)} bundles within 30 s; free resources now: "
                f"{_short(ray.available_resources())}; wait for other jobs to end, or ask for less"
            )

    def _check_capacity(self, placement: Placement, cpus: int) -> None:
        has = ray.cluster_resources()
        wanted = Counter({"CPU": cpus})
        for bundle in placement.bundles:
            wanted.update({"GPU": bundle.accelerator, **bundle.custom})
        for kind, needed in wanted.items():
            if needed > has.get(kind, 0) + 1e-6:
                raise JobError(
                    f"the job needs {needed:g} {kind}, but the cluster has {has.get(kind, 0):g} in all; "
                    "add nodes, or lower the roles' resources"
                )

    def _machines(self, placement: Placement) -> dict[tuple[str, int], str]:
        """A node for each machine of the roles that are spread over several.

        Ray chooses: a group of bundles that must be on different nodes is reserved for each such role, and given back
        when all have been found.
        """
        needs: dict[str, dict[int, Counter[str]]] = {}
        for bundle in placement.bundles:
            if bundle.machine is not None:
                role, index = bundle.machine
                needs.setdefault(role, {}).setdefault(index, Counter()).update(_ray_resources(bundle))
        found: dict[tuple[str, int], str] = {}
        held: list[PlacementGroup] = []
        try:
            for role, machines in needs.items():
                each = [{k: float(v) for k, v in machines[index].items()} for index in sorted(machines)]
                able = [node for node in ray.nodes() if node["Alive"] and _fits(each[0], node["Resources"])]
                wish = f"{role} is to be on {len(each)} machines with {_short(each[0])} on each"
                if len(able) < len(each):
                    raise JobError(
                        f"{wish}, but the cluster has {len(able)} of that size; join more to it (ray start "
                        "--address=HEAD:6379), or lower the role's number of nodes"
                    )
                held.append(placement_group(each, strategy="STRICT_SPREAD", name=f"troupe-{self._run_id}-{role}"))
                if not held[-1].wait(30):
                    raise JobError(f"{wish}, but not so many had room within 30 s; wait for other jobs to end")
                chosen: dict[int, str] = placement_group_table(held[-1])["bundles_to_node_id"]
                found |= {(role, index): chosen[place] for place, index in enumerate(sorted(machines))}
        finally:
            for group in held:
                remove_placement_group(group)
        return found

    def pickled(self, value: Any) -> bytes:
        """Bytes of a value whose class may be defined in the driver's own script."""
        return cloudpickle.dumps(value)

    def create(self, spec: HostSpec, plan: HostPlan, env: Mapping[str, str], attempt: int = 1) -> Any:
        """Start one host; returns its handle at once."""
        assert self._group is not None
        again = f"-{attempt}" if attempt > 1 else ""
        options: dict[str, Any] = {
            "name": f"troupe-{self._run_id}-{spec.name}{again}",
            "namespace": f"troupe-{self._run_id}",
            "num_cpus": plan.cpu,
            "num_gpus": plan.accelerator,
            "resources": plan.custom,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, plan.bundle),
        }
        if plan.memory:
            options["memory"] = plan.memory * 2**20
        if env:
            # Ray starts such workers through a shell, and hands it the path of Python as it is.
            quoted = shlex.quote(sys.executable)
            python = {} if quoted == sys.executable else {"py_executable": quoted}
            options["runtime_env"] = {"env_vars": dict(env), **python}
        # Groups cost every call a little, and their threads are not the main one: only for who asks for them.
        beside = max(worker.concurrency for worker in spec.workers)
        groups: Any = ray.remote(concurrency_groups={_BESIDE_OTHERS: beside})  # pyright: ignore[reportCallIssue]
        actor = groups(RayHost) if beside > 1 else _SingleThreaded
        return actor.options(**options).remote(spec)

    def invoke(self, handle: Any, method: str, *args: Any) -> Any:
        """Call a method of the host itself; returns a reference."""
        return getattr(handle, method).remote(*args)

    def kill(self, handle: Any) -> None:
        """End a host at once."""
        ray.kill(handle, no_restart=True)

    def release(self) -> None:
        """Give back what the job has reserved."""
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
            self._group = None

    def stop(self) -> None:
        """End the cluster if it was started for this job."""
        self._own_cluster.close()


def check_reachable(address: str) -> None:
    """Ray itself would try for minutes, and say so in its log."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():  # a client's address, or "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_WITHIN_S).close()
    except OSError as error:
        raise JobError(f"no Ray cluster answers at {address} ({error}); start it, or unset RAY_ADDRESS") from error


def _ray_resources(bundle: BundlePlan) -> dict[str, float]:
    found = {"CPU": bundle.cpu, "GPU": bundle.accelerator, "memory": float(bundle.memory * 2**20), **bundle.custom}
    return {key: value for key, value in found.items() if value}


def _fits(wanted: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(amount <= node.get(kind, 0) + 1e-6 for kind, amount in wanted.items())


def _short(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {key}" for key, value in sorted(resources.items()) if key in ("CPU", "GPU"))
