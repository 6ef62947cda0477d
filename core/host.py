"""A host: one process that holds workloads and runs the calls to them, one at a time, on its main thread."""

import faulthandler
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from core.context import Directory, Identity, Member, Transport, WorkloadContext, activate
from core.control import ControlServer, Status, memory_bytes
from core.invocation import Export, exports_of
from core.observers import CallEvent
from core.recovery import Recovery
from core.roles import Role
from core.sharding import payload_bytes
from core.workload import BaseWorkload, rendezvous_environment

IDLE = "idle"
"""What a process does between two calls."""


@dataclass(frozen=True)
class WorkerSpec:
    """One workload of a host: who it is and which class makes it."""

    identity: Identity
    entrypoint: str
    rendezvous: bool
    collocated_with: tuple[Role, ...] = ()


@dataclass(frozen=True)
class HostSpec:
    """Everything that a host needs to start. `config` is pickled: its class is importable only once paths are set."""

    name: str
    workers: tuple[WorkerSpec, ...]
    config: bytes
    key: bytes
    threads: int
    python_path: tuple[str, ...]
    working_dir: Path
    shared_dir: Path
    log_file: Path | None
    reports_calls: bool = False
    """Whether the master wants to hear of every call."""
    recovers: bool = False
    """Whether the master replaces who dies."""


@dataclass
class HostReport:
    """What a host answers when it is up: where its control channel is, and the ports kept for rendezvous."""

    ip: str
    hostname: str
    pid: int
    control: tuple[str, int]
    ports: dict[Role, int] = field(default_factory=dict)


@dataclass
class _Worker:
    context: WorkloadContext
    instance: Any = None
    exports: dict[str, tuple[Export, Callable[..., Any]]] = field(default_factory=dict)


class Host:
    """The process. All methods run on its main thread, in the order in which they were sent."""

    def __init__(self, spec: HostSpec, ip: str, transport: Transport) -> None:
        self._spec = spec
        self._prepare_process()
        self._ip = ip
        self._doing = ("starting", time.monotonic())
        self._transport = transport
        self._directory: Directory = {}
        self._recovery = Recovery(self._directory if spec.recovers else None)
        self._stop_requested = threading.Event()
        answer: dict[str, Callable[..., Any]] = {
            "status": self._status,
            "stack": self._stack,
            "stop": self._stop_requested.set,
            "lost": self._recovery.lose,
            "replay": self._replay,
            "replaced": lambda *member: self._recovery.replace(_member(*member)),
        }
        # Without a master nobody would end this process.
        self._control = ControlServer(ip, spec.key, answer, orphaned=lambda: os._exit(1))
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger().addHandler(_ToTerminal(partial(self._control.send, "say")))
        self._workers: dict[tuple[Role, int], _Worker] = {}
        self._reserved: dict[Role, socket.socket] = {}
        config = pickle.loads(spec.config)
        for worker in spec.workers:
            role = worker.identity.role
            context = WorkloadContext(
                identity=worker.identity,
                config=config,
                directory=self._directory,
                transport=transport,
                say=self._say,
                shared_dir=spec.shared_dir,
                collocated_with=worker.collocated_with,
                release_port=lambda role=role: self._release_port(role),
                recovery=self._recovery,
                tell=self._control.send,
                stop_requested=self._stop_requested,
            )
            self._workers[role, worker.identity.rank] = _Worker(context)

    def _prepare_process(self) -> None:
        # Before any user module is imported: libraries read these once.
        os.environ["OMP_NUM_THREADS"] = str(self._spec.threads)
        for path in reversed(self._spec.python_path):
            if path not in sys.path:
                sys.path.insert(0, path)
        # Relative paths in a configuration mean what they mean to the driver, where its folder exists here.
        if self._spec.working_dir.is_dir():
            os.chdir(self._spec.working_dir)
        if self._spec.log_file is not None:
            self._spec.log_file.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(self._spec.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)

    def _status(self) -> Status:
        doing, since = self._doing
        return Status(doing, time.monotonic() - since, memory_bytes())

    def _stack(self) -> tuple[str, str]:
        """Where the main thread is; all threads are written to the log."""
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return self._spec.name, "".join(traceback.format_stack(frame))

    def _replay(self, role: str, rank: int, handle: bytes, attempt: int) -> None:
        """Repeat on a replacement what this process had called on the lost worker, while the main thread goes on."""
        member = _member(role, rank, handle, attempt)

        def repeat() -> None:
            error = None
            try:
                self._recovery.replay(member, self._transport)
            except Exception as failure:  # noqa: BLE001 - the master raises it
                error = failure
            self._control.send("replayed", ((self._spec.name, role, rank, attempt), error))

        threading.Thread(target=repeat, name="troupe-replay", daemon=True).start()

    def _say(self, text: str) -> None:
        print(text, flush=True)
        self._control.send("say", text)

    def _release_port(self, role: Role) -> None:
        reserved = self._reserved.pop(role, None)
        if reserved is not None:
            reserved.close()

    def prepare(self) -> HostReport:
        """Import the workloads' classes, and keep a port for each role whose ranks will meet here."""
        run_id = self._spec.workers[0].identity.run_id
        print(f"{self._spec.name}: process {os.getpid()} on {self._ip} in run {run_id}", flush=True)
        report = HostReport(self._ip, socket.gethostname(), os.getpid(), self._control.address)
        for worker in self._spec.workers:
            load_object(worker.entrypoint)
            if worker.rendezvous and worker.identity.rank == 0:
                # Kept open until the process group is made, so that no other job on this machine is given it.
                reserved = socket.socket()
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                reserved.bind((self._ip, 0))
                self._reserved[worker.identity.role] = reserved
                report.ports[worker.identity.role] = reserved.getsockname()[1]
        return report

    def construct(
        self,
        rendezvous: dict[Role, tuple[str, int]],
        local: dict[tuple[Role, int], tuple[int, int]],
        directory: Directory,
        master_handle: Any = None,
    ) -> dict[Role, tuple[dict[str, Export], str]]:
        """Make the workloads and run their `setup()`; returns what each role exports and its class's name."""
        found: dict[Role, tuple[dict[str, Export], str]] = {}
        self._recovery.meet(directory, self._directory)
        for spec in self._spec.workers:
            role, rank = spec.identity.role, spec.identity.rank
            worker = self._workers[role, rank]
            local_rank, local_world_size = local[role, rank]
            worker.context.identity = replace(spec.identity, local_rank=local_rank, local_world_size=local_world_size)
            worker.context.rendezvous = rendezvous.get(role)
            activate(worker.context)
            if spec.rendezvous:
                os.environ.update(rendezvous_environment(worker.context))
            self._doing = (f"{role} set-up", time.monotonic())
            cls = load_object(spec.entrypoint)
            worker.instance = _instantiate(cls, worker.context, master_handle)
            if isinstance(worker.instance, BaseWorkload):
                worker.instance.setup()
            worker.exports = exports_of(worker.instance)
            callers_view = {name: entry.without_stub() for name, (entry, _) in worker.exports.items()}
            found[role] = (callers_view, f"{cls.__module__}.{cls.__qualname__}")
        self._doing = (IDLE, time.monotonic())
        return found

    def connect(self, directory: Directory) -> None:
        """Tell all workloads who the others are."""
        self._recovery.meet(directory, self._directory)

    def call(self, role: Role, rank: int, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run one exported method of one workload."""
        worker = self._workers[role, rank]
        if name not in worker.exports:
            raise AttributeError(
                f"{role}-{rank} has no method {name!r} to call; it has {', '.join(sorted(worker.exports))}"
            )
        _, function = worker.exports[name]
        return self._observed(worker, name, function, args, kwargs)

    def run(self, role: Role, rank: int) -> None:
        """Run a workload's `run()` to its end."""
        worker = self._workers[role, rank]
        self._observed(worker, "run", worker.instance.run, (), {})

    def has_run(self, role: Role, rank: int) -> bool:
        """Whether the workload has a `run()` of its own."""
        return callable(getattr(self._workers[role, rank].instance, "run", None))

    def teardown(self) -> None:
        """End the workloads in good order."""
        for worker in self._workers.values():
            if isinstance(worker.instance, BaseWorkload):
                activate(worker.context)
                worker.instance.teardown()

    def _observed(
        self, worker: _Worker, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        who, began, clock = worker.context.identity, time.time(), time.monotonic()
        activate(worker.context)
        event = CallEvent(who.job, who.role, who.rank, name, began, payload_bytes(*args, *kwargs.values()))
        self._doing = (f"{who.role}.{name}", clock)
        self._report(event)
        failed = True
        try:
            result = function(*args, **kwargs)
            failed = False
            return result
        finally:
            self._doing = (IDLE, time.monotonic())
            self._report(replace(event, seconds=time.monotonic() - clock, failed=failed))

    def _report(self, event: CallEvent) -> None:
        if self._spec.reports_calls:
            self._control.send("event", event)


def _member(role: str, rank: int, handle: bytes, attempt: int) -> Member:
    return Member(Role(role), rank, pickle.loads(handle), attempt)


class _ToTerminal(logging.Handler):
    """Shows the user the warnings of the project's and the user's own code; libraries only write to the log."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if "site-packages" not in record.pathname and not record.pathname.startswith(sys.base_prefix):
            self._say(f"warning: {record.getMessage()}")


def _instantiate(cls: type, context: WorkloadContext, master_handle: Any) -> Any:
    """Workloads and trainers get what their base class asks for; a plain class is made without arguments."""
    from core.trainer import BaseTrainer

    if issubclass(cls, BaseTrainer):
        others = {role: entry for role, entry in context.directory.items() if role != context.identity.role}
        handles = {role: [member.handle for member in entry.members] for role, entry in others.items()}
        return cls(handles, {role: entry.implementation for role, entry in others.items()}, context.config)
    if issubclass(cls, BaseWorkload):
        return cls(master_handle, context.config)
    return cls()


def load_object(path: str) -> Any:
    """The object named by `package.module:name`; a class that was wrapped by ray.remote is unwrapped."""
    module, _, name = path.partition(":")
    found = getattr(importlib.import_module(module), name)
    metadata = getattr(found, "__ray_metadata__", None)
    return getattr(metadata, "modified_class", found) if metadata is not None else found
