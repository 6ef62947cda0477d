"""The content of a worker process: workloads, and the calls to them, which run one at a time by default."""

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
IDLE, STARTING = "idle", "starting"
"""What a process does between two calls, and until the others are there too."""

Address = tuple[str, int]
WorkerKey = tuple[Role, int]
CallKey = tuple[Role, int, str]
"""The worker, and its method."""
KeptCall = tuple[int, int, bytes]
"""Attempt and number of a call, by which calls are in order, and its arguments."""


@dataclass(frozen=True)
class RunFacts:
    """What all processes of a run are told. `config` is as the backend packs it: its class can be imported only once
    paths are set.
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
    """Whether the master wants to hear of every call."""
    recovers: bool
    """Whether the master replaces who dies."""


@dataclass(frozen=True)
class ProcessSpec:
    """Everything that a process needs to start: of its run, its place in the plan, the roles of its workers."""

    run: RunFacts
    plan: ProcessPlan
    roles: dict[str, RoleSpec]
    env: dict[str, str]
    attempt: int

    @property
    def log_file(self) -> Path | None:
        """Where it writes its output; None leaves it to Ray."""
        return self.run.log_dir / f"{self.plan.name.lower()}.log" if self.run.log_dir else None


@dataclass
class ProcessReport:
    """What a process answers when it is up: where its control channel is, if it is a process of its own, and the ports
    kept for rendezvous.
    """

    ip: str
    machine: str
    pid: int
    node: str = ""
    """Which machine, or share of one, the cluster takes it for."""
    control: Address | None = None
    ports: dict[Role, int] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    """Those that the cluster has given it, as CUDA_VISIBLE_DEVICES names them."""


@dataclass
class Made:
    """What became of one workload: what it exports, its class's name, and whether it has a `run()`; see `RoleEntry`."""

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
        """Run what an async method returned on the workload's own loop, whose thread takes over the context."""
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, name="troupe-async", daemon=True).start()
        with self.context.waits():
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()


class WorkerProcess:
    """Workloads and what they need of each other. Its methods run one at a time, in the order in which they were sent.

    Args:
        spec: what to hold.
        config: what the job was built with.
        transport: how its workloads reach others.
        emit: passes a message to the master: its kind, and what it says.
    """

    printed: PrintedLines
    """Standard output while its workloads work; set by the process of each backend."""

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
        """What is around every wait of its workloads for others."""
        return nullcontext()

    def packed(self, exports: dict[str, Export]) -> dict[str, Export] | bytes:
        """What a workload exports, as it is sent to those who may call it; see `RoleEntry`."""
        return exports

    def job_memory(self) -> int:
        """Bytes that the job takes, whose workloads are all in this process."""
        return self._memory.read()

    def request_stop(self) -> None:
        """Let the workloads see that the user has asked for the end."""
        self._stop_requested.set()

    def report(self) -> ProcessReport:
        """Say where it is."""
        return ProcessReport("127.0.0.1", machine_id(), os.getpid())

    def import_classes(self) -> None:
        """Import the workloads' classes, before they are made."""
        for role in self._spec.plan.roles:
            load_object(self._spec.roles[role].entrypoint)

    def construct(
        self, rendezvous: dict[Role, Address], local: dict[WorkerKey, tuple[int, int]], shown: list[str]
    ) -> dict[Role, Made]:
        """Import the workloads' classes, make them, and run their `setup()`.

        Args:
            rendezvous: where the ranks of each role meet.
            local: (local rank, local world size) of each of its workers.
            shown: devices that it works on and another process has claimed; none where it has its own, or needs none.
        """
        if shown:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown)
        made: dict[Role, Made] = {}
        for (role, rank), local_ranks in local.items():
            spec, run = self._spec.roles[role], self._spec.run
            self._state = (f"{role} set-up", time.monotonic())
            cls = load_object(spec.entrypoint)
            cls_module = spec.entrypoint.partition(":")[0]
            who = (run.job, run.run_id, run.began, role, rank, spec.total)
            context = WorkloadContext(
                Identity(*who, *local_ranks, self._spec.attempt),
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
                beside = spec.concurrency > 1 and inspect.iscoroutinefunction(function)
                worker.exports[name] = (replace(entry, stub=None, concurrent=beside), function)
            callers_view = {name: entry for name, (entry, _) in worker.exports.items()}
            has_run = callable(getattr(worker.instance, "run", None)) and "run" not in worker.exports
            made[role] = Made(self.packed(callers_view), f"{cls.__module__}.{cls.__qualname__}", has_run)
        self._state = (IDLE, time.monotonic())
        return made

    def connect(self, directory: dict[Role, RoleEntry]) -> None:
        """Tell all workloads who the others are."""
        self._directory.meet(directory)

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
        """Start a workload's `run()` on a thread of its own; calls to the workload are served beside it."""
        worker = self._workers[role, rank]
        worker.run_thread = threading.Thread(
            target=self._run_beside, args=[worker], name=f"run() of {role}-{rank}", daemon=True
        )
        worker.run_thread.start()

    def _run_beside(self, worker: _Worker) -> None:
        who = worker.context.identity
        try:
            with entered(worker.context):
                result = worker.instance.run()
                if inspect.iscoroutine(result):
                    worker.finish(result)
        except BaseException as error:  # noqa: BLE001 - the master raises it
            if isinstance(error, SystemExit) and error.code in (None, 0):
                return
            traceback.print_exception(error)
            self._emit("failed", (who.role, who.rank, who.attempt, f"run() of {who.name} raised {first_line(error)}"))

    def teardown(self) -> None:
        """End the workloads in good order; each `run()` beside the trainer has ten seconds to return."""
        running = [worker.run_thread for worker in self._workers.values() if worker.run_thread]
        if running:
            self.request_stop()
        deadline = time.monotonic() + _RUN_GRACE_S
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                late = f"{thread.name} has not returned {_RUN_GRACE_S:g} s after the end of the trainer"
                self._emit("info", f"warning: {late}; it ends with its process")
        self.printed.show_count()
        for worker in self._workers.values():
            if isinstance(worker.instance, BaseWorkload):
                with entered(worker.context):
                    worker.instance.teardown()

    def _observed(self, worker: _Worker, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        who, clock, number = worker.context.identity, time.monotonic(), next(self._count)
        self._calls[number] = (f"{who.role}.{name}", clock)
        event = None
        if self._spec.run.reports_calls:
            size = payload_bytes(*args, *kwargs.values())
            event = CallEvent(who.job, who.role, who.rank, name, time.time(), size)
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
            # It would end the process, which the others would take for a death.
            failed = name != "run" or end.code not in (None, 0)
            if failed:
                raise RuntimeError(f"{who.name} called sys.exit({end.code!r}) in {name}") from end
        except Exception as error:
            me = worker.instance
            if self._spec.run.recovers and isinstance(me, BaseWorkload) and me.is_fatal(error):
                traceback.print_exception(error)
                self._emit("death", (who.role, who.rank, who.attempt, f"{first_line(error)}, in {name}"))
                threading.Event().wait()  # until the master has ended this process, and begun with what follows
            raise
        finally:
            del self._calls[number]
            self._state = (IDLE, time.monotonic())
            if event is not None:
                self._emit("event", replace(event, seconds=time.monotonic() - clock, failed=failed))

    def doing(self) -> tuple[str, float, float]:
        """The call that has run longest, or that there is none; for how many seconds; and since its last beat."""
        name, since = [*self._calls.values(), self._state][0]
        seconds = time.monotonic() - since
        return name, seconds, min(seconds, seconds_since_beat())


def _instantiate(cls: type, context: WorkloadContext) -> Any:
    """Workloads and trainers get what their base class asks for; a plain class is made without arguments."""
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
    """The object named by `package.module:name`; a class that was wrapped by ray.remote is unwrapped."""
    module, _, name = path.partition(":")
    # A million objects come and stay; to look through them again and again would take a seventh of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        found = getattr(importlib.import_module(module), name)
    finally:
        if collects:
            gc.enable()
    metadata = getattr(found, "__ray_metadata__", None)
    return getattr(metadata, "modified_class", found)


def python_path() -> tuple[str, ...]:
    """Folders of this process's module path without packages; other processes search them for the job's modules."""
    here = [str(Path(entry).resolve()) for entry in sys.path]
    return tuple(entry for entry in here if "site-packages" not in entry and not entry.startswith(sys.base_prefix))


def threads_here(threads: int) -> int:
    """How many threads that is on this machine, of whose cores TROUPE_CORES may be used; see `Resource.threads`."""
    # Not OMP_NUM_THREADS: Ray itself sets it to 1 in some of its processes.
    cores = int(os.environ.get("TROUPE_CORES") or len(os.sched_getaffinity(0)))
    return threads if threads > 0 else max(1, cores // -threads)


class WarningsTo(logging.Handler):
    """Shows the user the warnings of the project's and the user's own code; libraries only write to the log."""

    def __init__(self, info: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._info = info

    def emit(self, record: logging.LogRecord) -> None:
        if not is_library(record.pathname):
            self._info(f"warning: {record.getMessage()}")
