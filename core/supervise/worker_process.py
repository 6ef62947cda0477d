"""Worker process: holds workloads, and runs calls to them, by default one at a time."""

import asyncio
import gc
import importlib
import inspect
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from core.context import Identity, WorkloadContext, entered
from core.errors import first_line
from core.exports import Export, exports_of
from core.members import Directory, RoleEntry, Transport
from core.observers import CallEvent
from core.plan import ProcessPlan, RoleSpec
from core.printed import PrintedLines, is_library
from core.roles import Role
from core.sharding import payload_bytes
from core.shared_memory import machine_id
from core.supervise.control import MemoryGauge, seconds_since_beat
from core.workload import BaseWorkload, rendezvous_environment

_RUN_GRACE_S = 10.0
IDLE = "idle"
"""State of a process between two calls."""
STARTING = "starting"
"""State of a process until all other processes have started."""

Address = tuple[str, int]
WorkerKey = tuple[Role, int]
CallKey = tuple[Role, int, str]
"""(role, rank, method)."""
KeptCall = tuple[int, int, bytes]
"""(attempt, number of the call, pickled arguments). The first two give the order of the calls."""


@dataclass(frozen=True)
class RunFacts:
    """Data that all processes of a run receive.

    `config` is pickled by the backend, because its class can be imported only after `python_path` was set.
    """

    job: str
    run_id: str
    began: float
    config: Any
    key: bytes
    python_path: tuple[str, ...]
    working_dir: Path
    shared_dir: Path
    log_dir: Path | None
    collocations: list[list[str]]
    reports_calls: bool
    """True if processes send the master an event at the start and end of every call."""
    recovers: bool
    """True if the master replaces dead processes."""


@dataclass(frozen=True)
class ProcessSpec:
    """Everything that a process needs to start: run, placement, roles of its workers, environment and attempt."""

    run: RunFacts
    plan: ProcessPlan
    roles: dict[str, RoleSpec]
    env: dict[str, str]
    attempt: int

    @property
    def log_file(self) -> Path | None:
        """Path of the log file. None leaves the output to Ray."""
        return self.run.log_dir / f"{self.plan.name.lower()}.log" if self.run.log_dir else None


@dataclass
class ProcessReport:
    """First message of a process: its address, control channel, and reserved rendezvous ports."""

    ip: str
    machine: str
    pid: int
    node: str = ""
    """Node id in the cluster. Several nodes may be on one machine."""
    control: Address | None = None
    """Address of the control channel. None in local mode."""
    ports: dict[Role, int] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    """Devices that the cluster has reserved for it, as in CUDA_VISIBLE_DEVICES."""


@dataclass
class Made:
    """Fields of `RoleEntry` that are known after the construction of a workload."""

    sent_exports: dict[str, Export] | bytes
    implementation: str
    has_run: bool


@dataclass
class _Worker:
    context: WorkloadContext
    instance: Any = None
    run_thread: threading.Thread | None = None
    loop: asyncio.AbstractEventLoop | None = None
    exports: dict[str, tuple[Export, Callable[..., Any]]] = field(default_factory=dict)

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the workload's event loop, whose thread inherits the context, and return its result."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, name="troupe-async", daemon=True).start()
        with self.context.waits():
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()


class WorkerProcess:
    """Container of workloads. Its methods run one at a time, in the order in which they were sent.

    Args:
        spec: the process's workers and settings.
        config: configuration of the job.
        transport: transport for calls to other workloads.
        emit: callback that sends the master a message, given its kind and its content.
    """

    printed: PrintedLines
    """Standard output of the workloads, set by the subclass of each backend."""

    def __init__(self, spec: ProcessSpec, config: Any, transport: Transport, emit: Callable[[str, Any], None]) -> None:
        self._spec = spec
        self._config = config
        self._transport = transport
        self._emit = emit
        self._directory = Directory(spec.run.recovers)
        self._stop_requested = threading.Event()
        self._state = (STARTING, time.monotonic())
        self._calls: dict[int, tuple[str, float]] = {}
        self._count = itertools.count()
        self._workers: dict[WorkerKey, _Worker] = {}
        self._memory = MemoryGauge()

    def waits(self) -> AbstractContextManager[None]:
        """Return a context manager for waits of a workload. Here it does nothing."""
        return nullcontext()

    def packed(self, exports: dict[str, Export]) -> dict[str, Export] | bytes:
        """Return the exports in the form in which callers receive them; see `RoleEntry`."""
        return exports

    def job_memory(self) -> int:
        """Return the memory of the job in bytes. Here all workloads are in this process."""
        return self._memory.read()

    def request_stop(self) -> None:
        """Set `stop_requested` of the workloads."""
        self._stop_requested.set()

    def report(self) -> ProcessReport:
        """Return the address of this process."""
        return ProcessReport("127.0.0.1", machine_id(), os.getpid())

    def import_classes(self) -> None:
        """Import the workloads' classes before they are constructed."""
        for role in self._spec.plan.roles:
            load_object(self._spec.roles[role].entrypoint)

    def construct(
        self, rendezvous: dict[Role, Address], local: dict[WorkerKey, tuple[int, int]], shown: list[str]
    ) -> dict[Role, Made]:
        """Import the workloads' classes, construct the workloads, and run their `setup()`.

        Args:
            rendezvous: rendezvous address of each `train` role.
            local: (local rank, local world size) of each worker of this process.
            shown: devices that this process uses and another one has reserved. Empty if it has reserved its own, or
                uses none.
        """
        if shown:
            torch = sys.modules.get("torch")
            message = "a module has initialised CUDA on import, before GPUs were assigned; initialise it in setup()"
            assert torch is None or not torch.cuda.is_initialized(), message
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown)
        made: dict[Role, Made] = {}
        for (role, rank), local_ranks in local.items():
            spec = self._spec.roles[role]
            run = self._spec.run
            self._state = (f"{role} set-up", time.monotonic())
            cls = load_object(spec.entrypoint)
            cls_module = spec.entrypoint.partition(":")[0]
            context = WorkloadContext(
                Identity(run.job, run.run_id, run.began, role, rank, spec.total, *local_ranks, self._spec.attempt),
                self._config,
                self._directory,
                self._transport,
                self._emit,
                run.shared_dir,
                collocated_with=next((tuple(group) for group in run.collocations if role in group), ()),
                rendezvous=rendezvous.get(role),
                waits=self.waits,
                stop_requested=self._stop_requested,
                job_memory=self.job_memory,
            )
            os.environ.update(rendezvous_environment(context))
            worker = self._workers[role, rank] = _Worker(context)
            with entered(context):
                worker.instance = _instantiate(cls, context)
                if isinstance(worker.instance, BaseWorkload):
                    worker.instance.setup()
            for name, (entry, function) in exports_of(worker.instance, cls_module, context.exported).items():
                concurrent = spec.concurrency > 1 and inspect.iscoroutinefunction(function)
                # Without the stub, which callers do not need and might not be able to unpickle.
                worker.exports[name] = (replace(entry, stub=None, concurrent=concurrent), function)
            exports = {name: entry for name, (entry, _) in worker.exports.items()}
            has_run = callable(getattr(worker.instance, "run", None)) and "run" not in worker.exports
            made[role] = Made(self.packed(exports), f"{cls.__module__}.{cls.__qualname__}", has_run)
        self._state = (IDLE, time.monotonic())
        return made

    def connect(self, directory: dict[Role, RoleEntry]) -> None:
        """Store the directory of all roles for the workloads of this process."""
        self._directory.add_entries(directory)

    def call(self, role: Role, rank: int, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run one exported method of one workload."""
        worker = self._workers[role, rank]
        _, function = worker.exports[name]
        return self._observed(worker, name, function, *args, **kwargs)

    def run(self, role: Role, rank: int) -> None:
        """Run a workload's `run()` to its end."""
        worker = self._workers[role, rank]
        self._observed(worker, "run", worker.instance.run)

    def start_run(self, role: Role, rank: int) -> None:
        """Start a workload's `run()` in its own thread. Calls to the workload are served concurrently."""
        worker = self._workers[role, rank]
        worker.run_thread = threading.Thread(
            target=self._run_in_thread, args=[worker], name=f"run() of {role}-{rank}", daemon=True
        )
        worker.run_thread.start()

    def _run_in_thread(self, worker: _Worker) -> None:
        identity = worker.context.identity
        try:
            with entered(worker.context):
                result = worker.instance.run()
                if inspect.iscoroutine(result):
                    worker.finish(result)
        except BaseException as error:  # noqa: BLE001 - sent to the master, which raises it
            if isinstance(error, SystemExit) and error.code in (None, 0):
                return
            traceback.print_exception(error)
            text = f"run() of {identity.name} raised {first_line(error)}"
            self._emit("failed", (identity.role, identity.rank, identity.attempt, text))

    def teardown(self) -> None:
        """Stop the threads of `run()`, which have ten seconds to return, and call `teardown()` of the workloads."""
        running = [worker.run_thread for worker in self._workers.values() if worker.run_thread]
        if running:
            self.request_stop()
        deadline = time.monotonic() + _RUN_GRACE_S
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                late = f"{thread.name} has not returned {_RUN_GRACE_S:g} s after the end of the trainer"
                self._emit("info", f"warning: {late}; it is killed with its process")
        self.printed.show_count()
        for worker in self._workers.values():
            if isinstance(worker.instance, BaseWorkload):
                with entered(worker.context):
                    worker.instance.teardown()

    def _observed(self, worker: _Worker, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        identity = worker.context.identity
        began = time.monotonic()
        number = next(self._count)
        self._calls[number] = (f"{identity.role}.{name}", began)
        event = None
        if self._spec.run.reports_calls:
            size = payload_bytes(*args, *kwargs.values())
            event = CallEvent(identity.job, identity.role, identity.rank, name, time.time(), size)
            self._emit("event", event)
        failed = True
        try:
            with entered(worker.context):
                result = function(*args, **kwargs)
                if inspect.iscoroutine(result):
                    result = worker.finish(result)
            failed = False
            return result
        except SystemExit as end:
            # It would end the process, which the master would count as a death and not as a result or an error.
            failed = name != "run" or end.code not in (None, 0)
            if failed:
                raise RuntimeError(f"{identity.name} called sys.exit({end.code!r}) in {name}") from end
        except Exception as error:
            workload = worker.instance
            if self._spec.run.recovers and isinstance(workload, BaseWorkload) and workload.is_fatal(error):
                traceback.print_exception(error)
                death = (identity.role, identity.rank, identity.attempt, f"{first_line(error)}, in {name}")
                self._emit("death", death)
                # The master kills this process. To return the error first would end the job instead of recovering.
                threading.Event().wait()
            raise
        finally:
            del self._calls[number]
            self._state = (IDLE, time.monotonic())
            if event is not None:
                self._emit("event", replace(event, seconds=time.monotonic() - began, failed=failed))

    def doing(self) -> tuple[str, float, float]:
        """Return the oldest running call (or the state), its duration, and the time since its last beat in seconds."""
        name, since = [*self._calls.values(), self._state][0]
        seconds = time.monotonic() - since
        return name, seconds, min(seconds, seconds_since_beat())


def _instantiate(cls: type, context: WorkloadContext) -> Any:
    """Construct a workload with the arguments of its base class. A plain class is called without arguments."""
    from core.role_group import RoleGroup, WorkerHandle
    from core.trainer import BaseTrainer

    if issubclass(cls, BaseTrainer):
        others = {role: entry for role, entry in context.directory.items() if role != context.identity.role}
        groups = {role: RoleGroup[Any](role, context=context) for role in others}
        handles = {role: [WorkerHandle(group.on(rank)) for rank in range(len(group))] for role, group in groups.items()}
        return cls(handles, {role: entry.implementation for role, entry in others.items()}, context.config)
    if issubclass(cls, BaseWorkload):
        return cls(None, context.config)
    return cls()


def load_object(path: str) -> Any:
    """Return the object at `package.module:name`. A class wrapped by ray.remote is unwrapped."""
    module, _, name = path.partition(":")
    # An import creates up to a million objects that stay. Garbage collections during it would take 1/7 of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        value = getattr(importlib.import_module(module), name)
    finally:
        if was_enabled:
            gc.enable()
    metadata = getattr(value, "__ray_metadata__", None)
    return getattr(metadata, "modified_class", value)


def python_path() -> tuple[str, ...]:
    """Return the folders of sys.path without installed packages, in which other processes search the job's modules."""
    folders = [str(Path(entry).resolve()) for entry in sys.path]
    return tuple(path for path in folders if "site-packages" not in path and not path.startswith(sys.base_prefix))


def threads_here(threads: int) -> int:
    """Return the number of threads on this machine for a value of `Resource.threads`.

    The environment variable TROUPE_CORES limits the number of cores.
    """
    # OMP_NUM_THREADS is not used: Ray sets it to 1 in some of its processes.
    cores = int(os.environ.get("TROUPE_CORES") or len(os.sched_getaffinity(0)))
    return threads if threads > 0 else max(1, cores // -threads)


class WarningsTo(logging.Handler):
    """Logging handler that shows the user warnings of project and user code. Libraries only write to the log."""

    def __init__(self, info: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._info = info

    def emit(self, record: logging.LogRecord) -> None:
        if not is_library(record.pathname):
            self._info(f"warning: {record.getMessage()}")
