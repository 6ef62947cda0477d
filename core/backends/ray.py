"""Workloads as Ray actors: one plain, single-threaded actor per host, inside one placement group per job."""

import importlib
import logging
import math
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.cloudpickle import cloudpickle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.context import Member, Outcome
from core.errors import JobError, WorkerDied, with_note
from core.host import Host, HostSpec
from core.plan import HostPlan, Placement

OBJECT_STORE_BYTES = 2 * 2**30
"""Upper bound of a local cluster's object store; its memory is taken only as it is used."""


class RayTransport:
    """Calls as actor tasks, outcomes as object references."""

    def send(self, member: Member, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Submit one call."""
        return member.handle.call.remote(member.role, member.rank, name, *args, **kwargs)

    def put(self, value: Any) -> Any:
        """Store a value once."""
        return ray.put(value)

    def wait(self, references: list[Any], timeout: float | None) -> list[Any]:
        """Those that are ready after at most `timeout` seconds."""
        if not references:
            return []
        wanted = len(references) if timeout == 0 else 1
        ready, _ = ray.wait(references, num_returns=wanted, timeout=timeout)
        return ready

    def outcome(self, reference: Any) -> Outcome:
        """The value, or the error with its own type and the remote traceback as a note."""
        try:
            return Outcome(ray.get(reference))
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if cause is not error:
                with_note(cause, f"remote traceback:\n{error}")
            return Outcome(error=cause)
        except RayActorError as error:
            return Outcome(error=WorkerDied(f"the worker's process is gone ({type(error).__name__})"))


class RayHost(Host):
    """A host inside an actor."""

    def __init__(self, spec: HostSpec) -> None:
        super().__init__(spec, ray.util.get_node_ip_address(), RayTransport())


class RayBackend:
    """Starts and ends what a job needs on Ray; starts a cluster of its own when there is none."""

    def __init__(self, run_id: str, address: str | None) -> None:
        self._run_id = run_id
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._own_cluster = False
        self._group: PlacementGroup | None = None
        self.transport = RayTransport()

    def start(self, placement: Placement) -> None:
        """Connect or start Ray, and reserve the job's bundles.

        Raises:
            JobError: the cluster has less than the job needs.
        """
        cpus = math.ceil(sum(bundle.cpu for bundle in placement.bundles))
        if not ray.is_initialized():
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if self._address:
                ray.init(address=self._address, **quiet)
            else:
                # A throw-away cluster on this machine: nothing outside it may join, nothing is reported anywhere.
                os.environ.setdefault("RAY_AUTH_MODE", "disabled")
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                free = os.statvfs("/dev/shm")
                store = max(100 * 2**20, min(OBJECT_STORE_BYTES, free.f_bavail * free.f_frsize // 3))
                ray.init(
                    address="local",
                    num_cpus=max(cpus, os.cpu_count() or 1),
                    include_dashboard=False,
                    object_store_memory=store,
                    **quiet,
                )
                self._own_cluster = True
                # Ray prints a paragraph about each process that dies; the master names it in one line.
                vars(importlib.import_module("ray._private.worker"))["print_to_stdstream"] = lambda *_, **__: None
        self._check_capacity(placement, cpus)
        bundles = [_ray_resources(b.cpu, b.accelerator, b.memory) for b in placement.bundles]
        self._group = placement_group(bundles, strategy="PACK", name=f"troupe-{self._run_id}")
        if not self._group.wait(30):
            raise JobError(
                f"the cluster could not reserve the job's {len(bundles)} bundles within 30 s; free resources now: "
                f"{_short(ray.available_resources())}; wait for other jobs to end, or ask for less"
            )

    def _check_capacity(self, placement: Placement, cpus: int) -> None:
        has = ray.cluster_resources()
        gpus = sum(bundle.accelerator for bundle in placement.bundles)
        for kind, needed in (("CPU", cpus), ("GPU", gpus)):
            if needed > has.get(kind, 0) + 1e-6:
                raise JobError(
                    f"the job needs {needed:g} {kind}, but the cluster has {has.get(kind, 0):g} in all; "
                    "add nodes, or lower the roles' resources"
                )

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
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, plan.bundle),
        }
        if plan.memory:
            options["memory"] = plan.memory * 2**20
        if env:
            # Ray starts such workers through a shell, and hands it the path of Python as it is.
            quoted = shlex.quote(sys.executable)
            python = {} if quoted == sys.executable else {"py_executable": quoted}
            options["runtime_env"] = {"env_vars": dict(env), **python}
        return ray.remote(RayHost).options(**options).remote(spec)

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
        if self._own_cluster:
            ray.shutdown()
            self._own_cluster = False


def _ray_resources(cpu: float, accelerator: float, memory: int) -> dict[str, float]:
    found = {"CPU": cpu, "GPU": accelerator, "memory": float(memory * 2**20)}
    return {key: value for key, value in found.items() if value}


def _short(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {key}" for key, value in sorted(resources.items()) if key in ("CPU", "GPU"))


def python_path() -> tuple[str, ...]:
    """Folders that a host must search for the job's modules: those of this process that hold no installed packages."""
    here = [str(Path(entry).resolve()) for entry in sys.path]
    return tuple(entry for entry in here if "site-packages" not in entry and not entry.startswith(sys.base_prefix))
