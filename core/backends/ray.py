"""Workloads as Ray actors: one actor for each process of the job, inside one placement group per job."""

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
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.backends.ray_address import check_reachable, is_ray_left, unanswered
from core.backends.ray_process import RayProcess
from core.backends.ray_token import own_token, token_faults_named
from core.errors import JobError, ResultLost, WorkerDied, first_line, with_note
from core.exports import Export
from core.members import Member, Outcome, Share, Transport
from core.placement import detect_devices
from core.plan import BundlePlan, Placement
from core.shared_memory import BESIDE, shared_folder
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
"""Ray gives a silent node up after 64 s, unless it is told otherwise."""
_DEATHS = (
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.LocalRayletDiedError,
    exceptions.WorkerCrashedError,
    exceptions.OutOfMemoryError,
)
_LOSSES = (exceptions.ActorUnavailableError, exceptions.ObjectLostError)
"""What says nothing of the worker's life: its answer is gone, or it could not be reached for a while."""
_MOST_FOLDER_BYTES = 28
"""The path of a socket has 107 at most, of which Ray and we take 79 below the folder for temporary files."""
OBJECT_STORE_BYTES = 2 * 2**30
"""Upper bound of a local cluster's object store; its memory is taken only as it is used."""


class RayTransport(Transport):
    """Calls as actor tasks, outcomes as object references."""

    def send(self, member: Member, export: Export, share: Share) -> Any:
        """Submit one call. The task's name says which: Ray's tools show it, and it need not be an argument."""
        group = _CONCURRENTLY if export.concurrent else member.thread or None
        call = member.handle.call_named.options(name=f"{member.role}.{export.name}", concurrency_group=group)
        args, kwargs = share
        return call.remote(*args, **kwargs)

    def put(self, value: Any) -> Any:
        """Store a value once."""
        return ray.put(value)

    def wait(self, references: Sequence[Any], timeout: float | None, count: int = 1) -> list[Any]:
        """Those that are ready, once `count` are, or after `timeout` seconds (0: at once)."""
        if not references:
            return []
        wanted = len(references) if timeout == 0 else min(count, len(references))
        return ray.wait(list(references), num_returns=wanted, timeout=timeout)[0]

    async def ready(self, references: Sequence[Any]) -> None:
        """Wait until all are ready, without a thread."""
        if references:
            done, _ = await asyncio.wait([asyncio.wrap_future(reference.future()) for reference in references])
            for future in done:
                future.exception()  # looked at here, and raised by `outcome`

    def values(self, references: Sequence[Any]) -> list[Any] | None:
        """All values in one question to Ray, if they come within a moment."""
        try:
            return ray.get(list(references), timeout=_MOMENT_S)
        except Exception:  # noqa: BLE001 - whatever it is, `wait` and `outcome` find out whose
            return None

    def outcome(self, reference: Any) -> Outcome:
        """The value, or the error with its own type and the remote traceback as a note."""
        try:
            return Outcome(ray.get(reference))
        except exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            if cause is not error:
                with_note(cause, f"remote traceback:\n{error}")
            return Outcome(error=cause, raised=True)
        except _LOSSES as error:
            return Outcome(error=ResultLost(f"its result is lost ({type(error).__name__})"))
        except _DEATHS as error:
            return Outcome(error=WorkerDied(f"the worker's process is gone ({type(error).__name__})"))
        except exceptions.RayError as error:
            return Outcome(error=error)


@functools.cache
def _actor(concurrency: int, roles: tuple[str, ...]) -> Any:
    """The actor class of a process, by whose name Ray's tools show it; each that is made is shipped to all workers."""
    # Groups cost every call a little, and their threads are not the main one: only for who needs them.
    groups = {_CONCURRENTLY: concurrency} if concurrency > 1 else {}
    if len(roles) > 1:
        groups |= dict.fromkeys(roles, 1)
    remote: Any = ray.remote(concurrency_groups=groups) if groups else ray.remote  # pyright: ignore[reportCallIssue]
    return remote(type("+".join(roles), (RayProcess,), {}))


class RayBackend:
    """Starts and ends what a job needs on Ray; starts a cluster of its own when there is none."""

    is_local = False

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._own_cluster = contextlib.ExitStack()
        self._own_processes: list[tuple[str, Any]] = []
        self._stopped: dict[int, float] = {}
        """Since when a part of the own cluster is stopped, by its process."""
        self._own_folder: Path | None = None
        self._cluster_ended = threading.Event()
        """Set once the own cluster has ended, for the thread that has started it."""
        self._group: PlacementGroup | None = None
        self.transport = RayTransport()

    def start(self, placement: Placement, placement_timeout: float, info: Callable[[str], None]) -> None:
        """Connect or start Ray, and reserve the job's bundles.

        Args:
            placement: the job's bundles.
            placement_timeout: seconds to wait for room, which an autoscaler may be about to make.
            info: shows the user a line.

        Raises:
            JobError: nobody answers at the cluster's address, or it has less than the job needs.
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
            # Ray prints a paragraph about each process that dies; the master names it in one line.
            vars(importlib.import_module("ray._private.worker"))["print_to_stdstream"] = lambda *_, **__: None
        _await_silent_nodes(info)
        missing = _missing(placement, cpus)
        if missing and self._own_processes:
            raise JobError(f"{missing}; lower the roles' resources")
        nodes = self._machines(placement, placement_timeout, info)
        where = [{_NODE_LABEL: nodes[bundle.machine]} if bundle.machine else {} for bundle in placement.bundles]
        selected: dict[str, Any] = {"bundle_label_selector": where} if nodes else {}
        bundles = [_ray_resources(bundle) for bundle in placement.bundles]
        self._group = placement_group(bundles, strategy="PACK", name=f"troupe-{self._run_id}", **selected)
        wish = missing or f"the job's {len(bundles)} bundles are to be reserved"
        _await_group(self._group, wish, placement_timeout, info)

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
        # Ray's own choice is 15: whatever else runs on the machine would keep the workers from working.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Of so many calls it keeps what Ray's tools show. Ray's own choice is 100,000, 1 kB each, in the GCS.
        os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", "2000")
        store = max(100 * 2**20, min(OBJECT_STORE_BYTES, shutil.disk_usage("/dev/shm").free // 3))
        gpus = detect_devices() or None  # None: Ray may know of some
        # Ray lets everybody write to its folder, where its sockets are: it lies in one that is for this user alone.
        places = (os.environ.get("RAY_TMPDIR", ""), tempfile.gettempdir(), "/tmp")
        place = next(place for place in places if 0 < len(os.fsencode(place)) <= _MOST_FOLDER_BYTES)
        self._own_folder = Path(tempfile.mkdtemp(prefix="ray-", dir=place))
        (shared_folder(f"{self._run_id}-ray") / BESIDE).symlink_to(self._own_folder)
        options = {"include_dashboard": False, "object_store_memory": store, "_temp_dir": str(self._own_folder / "r")}
        try:
            with few_processes():
                start = functools.partial(ray.init, address="local", num_cpus=cpus, num_gpus=gpus, **options, **quiet)
                # Linux ends Ray's processes with the thread that has started them, not with the process.
                self._cluster_ended = threading.Event()
                _from_a_thread(start, until=self._cluster_ended)
        except BaseException as error:  # a signal too; what Ray has started by then knows of no end
            _end_all_of(self._own_folder)
            self.stop()
            is_ray_left.set()
            if not isinstance(error, Exception):
                raise
            # Ray has no other type for it; a machine may be so busy that 30 s are not enough
            raise WorkerDied(f"Ray did not start: {first_line(error)}") from error
        node = vars(importlib.import_module("ray._private.worker"))["_global_node"]
        for name in ("gcs_server", "raylet"):
            self._own_processes += [(name, started.process) for started in node.all_processes[name]]

    def fault(self) -> str:
        """What has died of the cluster that was started for this job; empty while all of it lives. A part that stays
        stopped would be waited for without end, so it is ended.
        """
        for name, process in self._own_processes:
            if process.poll() is not None:
                return f"Ray's own {name} has ended, with status {process.poll()}"
            if not _is_stopped(process.pid):
                self._stopped.pop(process.pid, None)
            elif time.monotonic() > self._stopped.setdefault(process.pid, time.monotonic()) + _STOPPED_S:
                process.kill()
        return ""

    def dead_nodes(self) -> set[str]:
        """Nodes that Ray has found dead."""
        return set() if self.fault() else {node["NodeID"] for node in ray.nodes() if not node["Alive"]}

    def room_missing(self) -> str:
        """What a process that is to be started again waits for; empty if its place is there."""
        if self._group is None or self.fault() or placement_group_table(self._group)["state"] == "CREATED":
            return ""
        return f"the cluster has no free resources for it; free now: {_short(ray.available_resources())}"

    def _machines(
        self, placement: Placement, timeout: float, info: Callable[[str], None]
    ) -> dict[tuple[str, int], str]:
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
        with contextlib.ExitStack() as held:
            for role, machines in needs.items():
                each = [{k: float(v) for k, v in machines[index].items()} for index in sorted(machines)]
                able = [node for node in ray.nodes() if node["Alive"] and _fits(each[0], node["Resources"])]
                group = placement_group(each, strategy="STRICT_SPREAD", name=f"troupe-{self._run_id}-{role}")
                held.callback(remove_placement_group, group)
                wish = (
                    f"{role} is to be on {len(each)} machines with {_short(each[0])} on each, and the cluster has "
                    f"{len(able)} of that size; join more to it (ray start --address=HEAD:6379), or lower the role's "
                    "number of nodes"
                )
                _await_group(group, wish, timeout, info)
                chosen: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
                found |= {(role, index): chosen[place] for place, index in enumerate(sorted(machines))}
        return found

    def pickled(self, value: Any) -> bytes:
        """Bytes of a value whose class may be defined in the driver's own script."""
        return cloudpickle.dumps(value)

    def create(self, spec: ProcessSpec) -> Any:
        """Start one process; returns its handle at once, as only actors without a name do."""
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
            # Ray starts such workers through a shell, and hands it the path of Python as it is.
            quoted = shlex.quote(sys.executable)
            python = {} if quoted == sys.executable else {"py_executable": quoted}
            options["runtime_env"] = {"env_vars": spec.env, **python}
        beside = max(role.concurrency for role in spec.roles.values())
        return _actor(beside, tuple(plan.roles)).options(**options).remote(spec, RayTransport())

    def invoke(self, handle: Any, method: str, *args: Any) -> Any:
        """Call a method of the process itself; returns a reference."""
        return getattr(handle, method).remote(*args)

    def kill(self, handle: Any) -> None:
        """End a process at once."""
        self._ask_ray(lambda: ray.kill(handle, no_restart=True))

    def release(self) -> None:
        """Give back what the job has reserved."""
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            self._ask_ray(lambda: remove_placement_group(group))

    def stop(self) -> None:
        """End the cluster if it was started for this job; its own logs stay where a part of it has died."""
        folder = self._own_folder
        # While Ray shuts down its processes end, which is no fault then.
        if folder is not None and (self.fault() or not self._ask(ray.shutdown, _SHUTDOWN_S)):
            # Ray's library would wait a minute for a cluster that is gone, and then end this process.
            _end_all_of(folder)
            if not self._ask(ray.shutdown, _SHUTDOWN_S):
                atexit.unregister(ray.shutdown)
            is_ray_left.set()
        elif folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        self._own_cluster.close()
        self._cluster_ended.set()
        self._own_folder = None
        self._own_processes = []

    def _ask_ray(self, call: Callable[[], object], seconds: float = _REACHED_WITHIN_S) -> bool:
        """Call Ray while the job's own cluster lives, and for so long at most; returns True where it has returned."""
        return not self.fault() and self._ask(call, seconds, self.fault)

    def _ask(self, call: Callable[[], object], seconds: float, fault: Callable[[], str] = str) -> bool:
        done = threading.Event()

        def ask() -> None:
            with contextlib.suppress(Exception):  # what is gone already needs no end
                call()
            done.set()

        threading.Thread(target=ask, name="troupe-last-call", daemon=True).start()
        deadline = time.monotonic() + seconds
        while not done.wait(_MOMENT_S) and time.monotonic() < deadline and not fault():
            pass
        return done.is_set()


@contextlib.contextmanager
def few_processes() -> Iterator[None]:
    """A Ray that is started herein has no server of a dashboard, no autoscaler, and no process that sends the driver
    what its workers print. Nothing of ours uses them; they take 290 MB, and a third of the time until Ray is up.

    ray.init has no options for it. A method that another version of Ray does not have is left alone.
    """
    node: Any = importlib.import_module("ray._private.node").Node
    constants = importlib.import_module("ray._private.ray_constants")

    def give_no_address(self: Any, **_: Any) -> None:
        # Ray's agent asks for the address once a second, and would write to its log that there is none.
        key, value = constants.DASHBOARD_ADDRESS.encode(), b"127.0.0.1:0"
        self.get_gcs_client().internal_kv_put(key, value, True, constants.KV_NAMESPACE_DASHBOARD)

    left_out: dict[str, Callable[..., None]] = dict.fromkeys(["start_monitor", "start_log_monitor"], lambda _: None)
    left_out["start_api_server"] = give_no_address
    with contextlib.ExitStack() as undo:
        for name in left_out.keys() & vars(node).keys():
            undo.callback(setattr, node, name, getattr(node, name))
            setattr(node, name, left_out[name])
        yield


def _is_stopped(pid: int) -> bool:
    """Whether a signal keeps a process that this one has started from going on."""
    with contextlib.suppress(ChildProcessError):  # it has ended meanwhile
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _end_all_of(folder: Path) -> None:
    """End what a Ray that did not start, or did not end, has left: processes whose commands name its folder, or that
    have opened a file in it: agents of Ray overwrite their commands.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            is_named = os.fsencode(folder) in (process / "cmdline").read_bytes()
            if is_named or (process.name != str(os.getpid()) and _has_opened(process, folder)):
                os.kill(int(process.name), signal.SIGKILL)


def _has_opened(process: Path, folder: Path) -> bool:
    return any(file.readlink().is_relative_to(folder) for file in (process / "fd").iterdir())


def _from_a_thread(call: Callable[[], object], seconds: float = math.inf, until: threading.Event | None = None) -> bool:
    """Let a thread call Ray, so that a signal finds the main thread in Python, whatever Ray waits for; returns True
    where it has returned in time. What it raises is raised here. The thread lives on `until` an event is set.
    """
    outcome: Future[object] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
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
    """What the whole cluster has too little of, in a sentence; empty if it has enough."""
    has = ray.cluster_resources()
    wanted = Counter({"CPU": cpus})
    for bundle in placement.bundles:
        wanted.update({"GPU": bundle.accelerator, **bundle.custom})
    for kind, needed in wanted.items():
        if needed > has.get(kind, 0) + 1e-6:
            roles = ", ".join(f"{role} {count:g}" for role, count in placement.devices.items() if count)
            of = f" ({roles})" if kind == "GPU" else ""
            return f"the job needs {needed:g} {kind}{of}, but the cluster has {has.get(kind, 0):g} in all"
    return ""


def _await_silent_nodes(info: Callable[[str], None]) -> None:
    """Wait until every node that Ray counts on answers: a reservation that meets a silent one blocks all others."""
    for attempt in range(_SILENT_WITHIN_S):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        with ThreadPoolExecutor(_KNOCKS_AT_ONCE) as pool:
            silent = list(filter(None, pool.map(_silent, nodes)))
        if not silent:
            return
        if attempt == 0:
            info(f"{', '.join(silent)} does not respond; waiting until it does, or until Ray gives it up")
        time.sleep(1)


def _silent(node: dict[str, Any]) -> str:
    """Its name if it does not answer."""
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _KNOCK_S).close()
    except OSError:
        return node["NodeManagerHostname"]
    return ""


def _await_group(group: PlacementGroup, wish: str, timeout: float, info: Callable[[str], None]) -> None:
    """Wait until a group of bundles is reserved, and say what is waited for."""
    began, report_at = time.monotonic(), min(_FIRST_REPORT_S, timeout / 2)
    while not group.wait(1):
        elapsed = time.monotonic() - began
        free = f"free now: {_short(ray.available_resources())}"
        if elapsed >= timeout:
            raise JobError(
                f"{wish}; there were no free resources within placement_timeout={timeout:g} s ({free}); wait for other "
                "jobs to end, add nodes, or ask for less"
            )
        if elapsed >= report_at:
            info(f"{wish}; waiting up to {timeout:g} s for resources ({free})")
            report_at *= 2


def _ray_resources(bundle: BundlePlan) -> dict[str, float]:
    found = {"CPU": bundle.cpu, "GPU": bundle.accelerator, "memory": float(bundle.memory * 2**20), **bundle.custom}
    return {key: value for key, value in found.items() if value}


def _fits(wanted: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(amount <= node.get(kind, 0) + 1e-6 for kind, amount in wanted.items())


def _short(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {key}" for key, value in sorted(resources.items()) if key in ("CPU", "GPU"))
