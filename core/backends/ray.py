"""Ray backend: one Ray actor per process of the job, inside one placement group per job."""

import asyncio
import atexit
import contextlib
import functools
import importlib
import logging
import math
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray.cloudpickle import cloudpickle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.backends.ray_address import check_reachable, is_ray_left, unanswered
from core.backends.ray_process import RayProcess
from core.backends.ray_token import own_token, token_faults_named
from core.errors import JobError, ResultLost, WorkerDied, first_line, with_note
from core.exports import Export
from core.members import Member, Outcome, Share, Transport
from core.placement import detect_devices
from core.plan import BundlePlan, Placement
from core.shared_memory import LINKED, shared_folder
from core.supervise.worker_process import ProcessSpec

_CONCURRENTLY = "concurrently"
_NODE_LABEL = "ray.io/node-id"
_MOMENT_S = 0.02
_REACHED_WITHIN_S = 10.0
_FIRST_REPORT_S = 10.0
_KNOCK_S = 3.0
_STOPPED_S = 10.0
_SHUTDOWN_S = 5.0
_JOINED_WITHIN_S = 20.0
_KNOCKS_AT_ONCE = 32
_SILENT_WITHIN_S = 90
"""Seconds to wait for silent nodes. Ray declares a silent node dead after 64 s by default."""
_DEATHS = (
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.LocalRayletDiedError,
    exceptions.WorkerCrashedError,
    exceptions.OutOfMemoryError,
)
_LOSSES = (exceptions.ActorUnavailableError, exceptions.ObjectLostError)
"""Errors after which the worker may still live: its result is lost, or it was unreachable for a while."""
_MOST_FOLDER_BYTES = 28
"""Maximum length of the folder for temporary files. A socket's path has at most 107 bytes, of which Ray and this module
use 79 below that folder."""
OBJECT_STORE_BYTES = 2 * 2**30
"""Maximum size of a local cluster's object store. The memory is allocated only as it is used."""


class RayTransport(Transport):
    """Transport over Ray: calls are actor tasks, references are object references."""

    def send(self, member: Member, export: Export, share: Share) -> Any:
        """Submit one call and return its object reference."""
        # The name of the task selects the method, so that Ray's tools show it and no argument is needed for it.
        group = _CONCURRENTLY if export.concurrent else member.thread or None
        call = member.handle.call_named.options(name=f"{member.role}.{export.name}", concurrency_group=group)
        args, kwargs = share
        return call.remote(*args, **kwargs)

    def put(self, value: Any) -> Any:
        """Store a value once in the object store."""
        return ray.put(value)

    def wait(self, references: Sequence[Any], timeout: float | None, count: int = 1) -> list[Any]:
        """Wait until `count` references are ready or `timeout` seconds have passed, and return the ready ones."""
        if not references:
            return []
        count = len(references) if timeout == 0 else min(count, len(references))
        return ray.wait(list(references), num_returns=count, timeout=timeout)[0]

    async def ready(self, references: Sequence[Any]) -> None:
        """Wait until all references are ready, without blocking a thread."""
        if references:
            done, _ = await asyncio.wait([asyncio.wrap_future(reference.future()) for reference in references])
            for future in done:
                # retrieved, because asyncio would otherwise log it as unhandled; `outcome` raises it
                future.exception()

    def values(self, references: Sequence[Any]) -> list[Any] | None:
        """Fetch all values with one request to Ray, or return None if they do not arrive within a moment."""
        try:
            return ray.get(list(references), timeout=_MOMENT_S)
        except Exception:  # noqa: BLE001 - `wait` and `outcome` then find the worker that failed
            return None

    def outcome(self, reference: Any) -> Outcome:
        """Return the value, or the error with its original type and the remote traceback as a note."""
        try:
            return Outcome(ray.get(reference))
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, BaseException):
                return Outcome(error=with_note(error.cause, f"remote traceback:\n{error}"), raised=True)
            return Outcome(error=error, raised=True)
        except _LOSSES as error:
            return Outcome(error=ResultLost(f"its result is lost ({type(error).__name__})"))
        except _DEATHS as error:
            return Outcome(error=WorkerDied(f"the worker's process has died ({type(error).__name__})"))
        except exceptions.RayError as error:
            return Outcome(error=error)


@functools.cache
def _actor(concurrency: int, roles: tuple[str, ...]) -> Any:
    """Return the actor class of a process, named for its roles so that Ray's tools show them."""
    # Cached, because Ray ships every actor class to all workers. Concurrency groups only where needed: they slow down
    # every call a little, and their threads are not the main thread.
    groups: dict[str, int] = {}
    if concurrency > 1:
        groups[_CONCURRENTLY] = concurrency
    if len(roles) > 1:
        groups |= dict.fromkeys(roles, 1)
    remote: Any = ray.remote(concurrency_groups=groups) if groups else ray.remote  # pyright: ignore[reportCallIssue]
    return remote(type("+".join(roles), (RayProcess,), {}))


class RayBackend:
    """Backend that runs the processes of a job on Ray. It starts a local cluster if none exists."""

    is_local = False

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._own_cluster = contextlib.ExitStack()
        self._own_processes: list[tuple[str, Any]] = []
        self._stopped: dict[int, float] = {}
        """Time since which a process of the job's own cluster has been stopped by a signal, by pid."""
        self._own_folder: Path | None = None
        self._cluster_ended = threading.Event()
        """Set when the job's own cluster has ended. The thread that started the cluster waits for it."""
        self._group: PlacementGroup | None = None
        self.transport = RayTransport()

    def start(self, placement: Placement, placement_timeout: float, info: Callable[[str], None]) -> None:
        """Connect or start Ray, and reserve the job's bundles.

        Args:
            placement: the job's bundles.
            placement_timeout: seconds to wait for free resources, which an autoscaler may be adding.
            info: callback that shows the user a line.

        Raises:
            JobError: no cluster responds at the address, or it has fewer resources than the job needs.
        """
        cpus = math.ceil(sum(bundle.cpu for bundle in placement.bundles))
        if not ray.is_initialized():
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if address := os.environ.get("RAY_ADDRESS"):
                check_reachable(address)
                with token_faults_named(address):
                    self._join(address, quiet)
            else:
                self._start_own(max(cpus, os.cpu_count() or 1), quiet)
            # Silence Ray's paragraph about each dead process: the master reports it in one line.
            vars(importlib.import_module("ray._private.worker"))["print_to_stdstream"] = lambda *_, **__: None
        _await_silent_nodes(info)
        missing = _missing(placement, cpus)
        if missing and self._own_processes:
            raise JobError(f"{missing}; lower the roles' resources")
        nodes = self._machines(placement, placement_timeout, info)
        selected: dict[str, Any] = {}
        if nodes:
            labels: dict[Any, Any] = {machine: {_NODE_LABEL: node} for machine, node in nodes.items()}
            selected["bundle_label_selector"] = [labels.get(bundle.machine, {}) for bundle in placement.bundles]
        bundles = [_ray_resources(bundle) for bundle in placement.bundles]
        self._group = placement_group(bundles, strategy="PACK", name=f"troupe-{self._run_id}", **selected)
        request = missing or f"reserving the job's {len(bundles)} bundles"
        _await_group(self._group, request, placement_timeout, info)

    def _join(self, address: str, quiet: Mapping[str, Any]) -> None:
        try:
            if _from_a_thread(functools.partial(ray.init, address=address, **quiet), _JOINED_WITHIN_S):
                return
        except Exception as error:
            raise unanswered(address, _JOINED_WITHIN_S, error) from error
        is_ray_left.set()
        raise unanswered(address, _JOINED_WITHIN_S)

    def _start_own(self, cpus: int, quiet: dict[str, Any]) -> None:
        self._own_cluster.enter_context(own_token(shared_folder(f"{self._run_id}-ray")))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's default is 15, with which other programs on the machine would starve the workers.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Number of calls that Ray's tools can show. Ray's default of 100,000 takes 1 kB each in the GCS.
        os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", "2000")
        store = max(100 * 2**20, min(OBJECT_STORE_BYTES, shutil.disk_usage("/dev/shm").free // 3))
        gpus = detect_devices() or None  # None: Ray counts the devices itself
        # Ray's folder, which has its sockets, is writable for everybody. So it is created in a private folder.
        places = (os.environ.get("RAY_TMPDIR", ""), tempfile.gettempdir(), "/tmp")
        place = next(place for place in places if 0 < len(os.fsencode(place)) <= _MOST_FOLDER_BYTES)
        self._own_folder = Path(tempfile.mkdtemp(prefix="ray-", dir=place))
        (shared_folder(f"{self._run_id}-ray") / LINKED).symlink_to(self._own_folder)
        options = {"include_dashboard": False, "object_store_memory": store, "_temp_dir": str(self._own_folder / "r")}
        try:
            with few_processes():
                start = functools.partial(ray.init, address="local", num_cpus=cpus, num_gpus=gpus, **options, **quiet)
                # Linux ends Ray's processes with the thread that has started them, not with the process. So that
                # thread must live as long as the cluster.
                self._cluster_ended = threading.Event()
                _from_a_thread(start, until=self._cluster_ended)
        except BaseException as error:  # also a signal, after which the processes started so far would never end
            _end_all_of(self._own_folder)
            self.stop()
            is_ray_left.set()
            if not isinstance(error, Exception):
                raise
            # WorkerDied lets the master try again: on a busy machine Ray's limit of 30 s may be too short. Ray's own
            # errors do not distinguish that case.
            raise WorkerDied(f"Ray did not start: {first_line(error)}") from error
        node = vars(importlib.import_module("ray._private.worker"))["_global_node"]
        self._own_processes += [(n, each.process) for n in ("gcs_server", "raylet") for each in node.all_processes[n]]

    def fault(self) -> str:
        """Return a description of the dead process of the job's own cluster, or an empty string if all are alive.

        A process that stays stopped by a signal for long is killed, because Ray would wait for it without a limit.
        """
        for name, process in self._own_processes:
            if process.poll() is not None:
                return f"Ray's {name} process has ended with status {process.poll()}"
            if not _is_stopped(process.pid):
                self._stopped.pop(process.pid, None)
            elif time.monotonic() > self._stopped.setdefault(process.pid, time.monotonic()) + _STOPPED_S:
                process.kill()
        return ""

    def dead_nodes(self) -> set[str]:
        """Return the ids of nodes that Ray has declared dead."""
        # A call to a dead cluster would block.
        return set() if self.fault() else {node["NodeID"] for node in ray.nodes() if not node["Alive"]}

    def room_missing(self) -> str:
        """Return a description of the resources that a replacement waits for, or an empty string if it has them."""
        if self._group is None or self.fault() or placement_group_table(self._group)["state"] == "CREATED":
            return ""
        return f"the cluster has no free resources for it; free now: {_short(ray.available_resources())}"

    def _machines(
        self, placement: Placement, timeout: float, info: Callable[[str], None]
    ) -> dict[tuple[str, int], str]:
        """Choose a node for each machine of the roles that span several machines.

        Ray chooses the nodes: for each such role a placement group with STRICT_SPREAD is reserved, and released when
        the nodes of all roles are known.
        """
        needs: dict[str, dict[int, Counter[str]]] = {}
        for bundle in placement.bundles:
            if bundle.machine is not None:
                role, index = bundle.machine
                needs.setdefault(role, {}).setdefault(index, Counter()).update(_ray_resources(bundle))
        nodes: dict[tuple[str, int], str] = {}
        with contextlib.ExitStack() as reserved:
            for role, machines in needs.items():
                each = [{k: float(v) for k, v in machines[index].items()} for index in sorted(machines)]
                able = [node for node in ray.nodes() if node["Alive"] and _fits(each[0], node["Resources"])]
                group = placement_group(each, strategy="STRICT_SPREAD", name=f"troupe-{self._run_id}-{role}")
                reserved.callback(remove_placement_group, group)
                request = (
                    f"{role} needs {len(each)} machines with {_short(each[0])} on each, and the cluster has "
                    f"{len(able)} of that size; add nodes (ray start --address=HEAD:6379), or lower the role's number "
                    "of nodes"
                )
                _await_group(group, request, timeout, info)
                chosen: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
                nodes |= {(role, index): chosen[place] for place, index in enumerate(sorted(machines))}
        return nodes

    def pickled(self, value: Any) -> bytes:
        """Pickle a value whose class may be defined in the driver's script, which workers cannot import."""
        return cloudpickle.dumps(value)

    def create(self, spec: ProcessSpec) -> Any:
        """Start one process, and return its handle immediately. The actor has no name: Ray waits for named actors."""
        assert self._group is not None
        plan = spec.plan
        options: dict[str, Any] = {
            "num_cpus": plan.cpu,
            "num_gpus": plan.accelerator,
            "resources": plan.custom,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, plan.bundle),
        }
        if plan.memory:
            options["memory"] = plan.memory * 2**20
        if spec.env:
            # Ray starts workers with environment variables through a shell, and does not quote the path of Python.
            runtime_env: dict[str, Any] = {"env_vars": spec.env}
            quoted = shlex.quote(sys.executable)
            if quoted != sys.executable:
                runtime_env["py_executable"] = quoted
            options["runtime_env"] = runtime_env
        concurrency = max(role.concurrency for role in spec.roles.values())
        return _actor(concurrency, tuple(plan.roles)).options(**options).remote(spec, RayTransport())

    def invoke(self, handle: Any, method: str, *args: Any) -> Any:
        """Call a method of the process itself, and return a reference to the outcome."""
        return getattr(handle, method).remote(*args)

    def kill(self, handle: Any) -> None:
        """Kill a process."""
        self._call_ray(lambda: ray.kill(handle, no_restart=True))

    def release(self) -> None:
        """Release the resources that the job has reserved."""
        group = self._group
        self._group = None
        if group is not None and ray.is_initialized():
            self._call_ray(lambda: remove_placement_group(group))

    def stop(self) -> None:
        """Shut down the cluster if it was started for this job. If one of its processes has died, its logs are kept."""
        folder = self._own_folder
        # `_call` and not `_call_ray`: the processes end during the shutdown, which is no fault.
        if folder is not None and (self.fault() or not self._call(ray.shutdown, _SHUTDOWN_S)):
            # Ray's library would wait a minute for a dead cluster, and then end this process.
            _end_all_of(folder)
            if not self._call(ray.shutdown, _SHUTDOWN_S):
                atexit.unregister(ray.shutdown)
            is_ray_left.set()
        elif folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        self._own_cluster.close()
        self._cluster_ended.set()
        self._own_folder = None
        self._own_processes = []

    def _call_ray(self, call: Callable[[], object], seconds: float = _REACHED_WITHIN_S) -> bool:
        """Call Ray unless the job's own cluster has a fault. Return True if the call returned within the time limit."""
        return not self.fault() and self._call(call, seconds, self.fault)

    def _call(self, call: Callable[[], object], seconds: float, fault: Callable[[], str] = str) -> bool:
        done = threading.Event()

        def run() -> None:
            with contextlib.suppress(Exception):  # the process or group has ended already, which is the aim
                call()
            done.set()

        threading.Thread(target=run, name="troupe-last-call", daemon=True).start()
        deadline = time.monotonic() + seconds
        while not done.wait(_MOMENT_S) and time.monotonic() < deadline and not fault():
            pass
        return done.is_set()


@contextlib.contextmanager
def few_processes() -> Iterator[None]:
    """Start Ray inside the block without its dashboard, autoscaler and log monitor.

    This project does not use them. They take 290 MB, and a third of Ray's start-up time. ray.init has no option for
    them, so methods of Ray's Node class are replaced. A method that another version of Ray lacks is skipped.
    """
    node: Any = importlib.import_module("ray._private.node").Node
    constants = importlib.import_module("ray._private.ray_constants")

    def store_empty_address(self: Any, **_: Any) -> None:
        # Ray's agent reads the address once a second, and would log an error each time if there were none.
        key = constants.DASHBOARD_ADDRESS.encode()
        self.get_gcs_client().internal_kv_put(key, b"127.0.0.1:0", True, constants.KV_NAMESPACE_DASHBOARD)

    replaced: dict[str, Callable[..., None]] = dict.fromkeys(["start_monitor", "start_log_monitor"], lambda _: None)
    replaced["start_api_server"] = store_empty_address
    with contextlib.ExitStack() as undo:
        for name in replaced.keys() & vars(node).keys():
            undo.callback(setattr, node, name, getattr(node, name))
            setattr(node, name, replaced[name])
        yield


def _is_stopped(pid: int) -> bool:
    """True if a child process of this process has been stopped by a signal."""
    with contextlib.suppress(ChildProcessError):  # the process has ended in the meantime
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _end_all_of(folder: Path) -> None:
    """Kill the processes of a Ray cluster that did not start or did not shut down.

    They are the processes whose command line names the cluster's folder, and those with an open file in it. Ray's
    agents overwrite their command line, so that the first alone would miss them.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended in the meantime, or is another user's
            is_named = os.fsencode(folder) in (process / "cmdline").read_bytes()
            # Not evaluated yet: it raises an error if a file is closed meanwhile, and a named process is killed anyway.
            opened = (file.readlink().is_relative_to(folder) for file in (process / "fd").iterdir())
            if is_named or (process.name != str(os.getpid()) and any(opened)):
                os.kill(int(process.name), signal.SIGKILL)


def _from_a_thread(call: Callable[[], object], seconds: float = math.inf, until: threading.Event | None = None) -> bool:
    """Call Ray in a thread. Return True if the call returned within `seconds`, and raise its error.

    The main thread stays in Python code, so it handles signals even while Ray blocks. After the call the thread waits
    for the event `until`.
    """
    outcome: Future[object] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for the outcome
            outcome.set_exception(error)
        else:
            if until is not None:
                until.wait()

    threading.Thread(target=run, name="troupe-ray", daemon=True).start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if wait([outcome], _MOMENT_S).done:
            outcome.result()
            return True
    return False


def _missing(placement: Placement, cpus: int) -> str:
    """Return a sentence about a resource that the whole cluster has too little of, or an empty string."""
    available = ray.cluster_resources()
    required = Counter({"CPU": cpus})
    for bundle in placement.bundles:
        required.update({"GPU": bundle.accelerator, **bundle.custom})
    for kind, needed in required.items():
        if needed > available.get(kind, 0) + 1e-6:
            roles = ", ".join(f"{role} {count:g}" for role, count in placement.devices.items() if count)
            label = {"GPU": f"GPU ({roles})"}.get(kind, kind)
            return f"the job needs {needed:g} {label}, but the cluster has {available.get(kind, 0):g} in all"
    return ""


def _await_silent_nodes(info: Callable[[str], None]) -> None:
    """Wait until all nodes respond that Ray considers alive."""
    # A reservation on a node that does not respond blocks all other reservations of the cluster.
    for attempt in range(_SILENT_WITHIN_S):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        with ThreadPoolExecutor(_KNOCKS_AT_ONCE) as pool:
            silent = list(filter(None, pool.map(_silent, nodes)))
        if not silent:
            return
        if attempt == 0:
            info(f"{', '.join(silent)} does not respond; waiting until it does, or until Ray declares it dead")
        time.sleep(1)


def _silent(node: dict[str, Any]) -> str:
    """Return the name of a node that does not respond, or an empty string."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _KNOCK_S).close()
    except OSError:
        return node["NodeManagerHostname"]
    return ""


def _await_group(group: PlacementGroup, request: str, timeout: float, info: Callable[[str], None]) -> None:
    """Wait until a placement group is reserved, and log the wait.

    Raises:
        JobError: the resources were not free within `timeout` seconds.
    """
    began = time.monotonic()
    report_at = min(_FIRST_REPORT_S, timeout / 2)
    while not group.wait(1):
        elapsed = time.monotonic() - began
        free = f"free now: {_short(ray.available_resources())}"
        if elapsed >= timeout:
            raise JobError(
                f"{request}: no free resources within placement_timeout={timeout:g} s ({free}); wait for other jobs "
                "to end, add nodes, or lower the roles' resources"
            )
        if elapsed >= report_at:
            info(f"{request}; waiting up to {timeout:g} s for resources ({free})")
            report_at *= 2


def _ray_resources(bundle: BundlePlan) -> dict[str, float]:
    amounts = {"CPU": bundle.cpu, "GPU": bundle.accelerator, "memory": float(bundle.memory * 2**20), **bundle.custom}
    return {kind: amount for kind, amount in amounts.items() if amount}


def _fits(needed: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(amount <= node.get(kind, 0) + 1e-6 for kind, amount in needed.items())


def _short(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {key}" for key, value in sorted(resources.items()) if key in ("CPU", "GPU"))
