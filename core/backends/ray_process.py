"""A worker process as a Ray actor, with a log and a side thread that answers the master."""

import contextlib
import faulthandler
import functools
import logging
import operator
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.cloudpickle import cloudpickle

from core.errors import with_note
from core.exports import Export
from core.members import Transport
from core.printed import PrintedLines
from core.roles import Role
from core.shared_memory import claim_shared, leave_shared, machine_id, sweep_shared
from core.supervise.control import ControlServer, Status
from core.supervise.worker_process import (
    CallKey,
    KeptCall,
    ProcessReport,
    ProcessSpec,
    WarningsTo,
    WorkerProcess,
    threads_here,
)


class RayProcess(WorkerProcess):
    """The actor. What the master asks runs in the order in which it was sent, and so do the calls to each workload.

    A process of one workload does all of this on its main thread. Where several share it, each has a thread, so that
    they can call each other; they work one at a time.
    """

    def __init__(self, spec: ProcessSpec, transport: Transport) -> None:
        _prepare(spec)
        super().__init__(spec, pickle.loads(spec.run.config), transport, self._to_master)
        self._ip = ray.util.get_node_ip_address()
        # Of the roles whose ranks meet here.
        self._ports: dict[Role, socket.socket] = {}
        self._turn = threading.RLock()
        self._job_memory = 0
        answer: dict[str, Callable[..., Any]] = {
            "status": self._status,
            "stack": self._stack,
            "stop": self.request_stop,
            "tidy": self._tidy,
            "lost": self._directory.lose,
            "replaced": lambda member: self._directory.replace(pickle.loads(member)),
        }
        # Without a master nobody would end this process.
        self._control = ControlServer(self._ip, spec.run.key, answer, orphaned=self._end)
        self._log = sys.stdout
        show = functools.partial(self._control.send, "info")
        self.printed = sys.stdout = PrintedLines(spec.plan.name, show, spec.log_file, self._log)
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger().addHandler(WarningsTo(show))

    def _to_master(self, kind: str, payload: Any) -> None:
        if kind == "info":
            print(payload, file=self._log, flush=True)
        self._control.send(kind, payload)

    def _status(self, job_memory: int) -> Status:
        self._job_memory = job_memory
        return Status(*self.doing(), self._memory.read())

    def _tidy(self) -> bool:
        """Remove what the run has in this machine's shared memory; the answer says that it is done."""
        shutil.rmtree(self._spec.run.shared_dir, ignore_errors=True)
        return True

    def _end(self) -> None:
        # Others of the run may live on this machine: the master may have given up this process alone.
        leave_shared(self._spec.run.shared_dir)
        os._exit(1)

    def job_memory(self) -> int:
        """Bytes that all processes of the job take, by the master's last count."""
        return self._job_memory

    def report(self) -> ProcessReport:
        """Say where it is, and which node Ray takes it for: several may have one address.

        A port is kept for each role whose ranks will meet here, so that no other job on this machine is given it.
        """
        sweep_shared()
        claim_shared(self._spec.run.shared_dir)
        run = f"process {os.getpid()} on {self._ip} in run {self._spec.run.run_id}"
        print(f"{self._spec.plan.name}: {run}", file=self._log, flush=True)
        for role, rank in self._spec.plan.workers:
            if rank == 0 and self._spec.roles[role].kind == "train":
                self._ports[Role(role)] = kept_port()
        return ProcessReport(
            self._ip,
            machine_id(),
            os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            control=self._control.address,
            ports={role: kept.getsockname()[1] for role, kept in self._ports.items()},
            devices=sorted(ray.get_runtime_context().get_accelerator_ids().get("GPU", [])),
        )

    def packed(self, exports: dict[str, Export]) -> bytes:
        """As `WorkerProcess.packed`: pickled, as what they name takes seconds to import, and few processes need it."""
        return cloudpickle.dumps(exports)

    def call_named(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method that the task is named after, `ACTOR.update`: so it is called in Ray's own tools too."""
        name = ray.get_runtime_context().get_task_name()
        assert name is not None
        role, _, method = name.partition(".")
        key, worker = next(found for found in self._workers.items() if found[0][0] == role)
        export = worker.exports[method][0]
        try:
            with contextlib.nullcontext() if export.concurrent else self._turn:
                if export.replay and self._spec.run.recovers:
                    return self._call_and_keep((*key, method), *args, **kwargs)
                return self.call(*key, method, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it is raised, in a form that arrives
            raise _that_can_be_sent(error) from error.__cause__

    def _call_and_keep(self, key: CallKey, /, *args: Any, **kwargs: Any) -> Any:
        """As `call`; the master keeps the last call that has succeeded, to have it repeated in a replacement. One that
        this process dies in is not among them: its caller sends it again.
        """
        kept = (self._spec.attempt, next(self._count), cloudpickle.dumps((args, kwargs)))
        result = self.call(*key, *args, **kwargs)
        self._control.send("kept", (key, kept))
        return result

    def repeat(self, calls: dict[CallKey, KeptCall]) -> None:
        """Call again here, in the same order, what was called in the process that this one replaces."""
        for key, (_, _, pickled) in sorted(calls.items(), key=operator.itemgetter(1)):
            args, kwargs = pickle.loads(pickled)
            self.call(*key, *args, **kwargs)

    def run(self, role: Role, rank: int) -> None:
        """As `WorkerProcess.run`; siblings work while it waits for them."""
        with self._turn:
            super().run(role, rank)

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """The turn is given away meanwhile, if this thread has it."""
        has_turn = True
        try:
            self._turn.release()
        except RuntimeError:
            has_turn = False
        try:
            yield
        finally:
            if has_turn:
                self._turn.acquire()

    def _stack(self) -> str:
        """Where the main thread is; all threads are written to the log."""
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return "".join(traceback.format_stack(frame))


def kept_port() -> socket.socket:
    """A socket at a free port of all addresses. As long as it is open nobody is given the port by chance, and whoever
    knows it and sets SO_REUSEADDR, as torch does, can listen there.
    """
    kept = socket.socket()
    kept.bind(("", 0))
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return kept


def _that_can_be_sent(error: Exception) -> Exception:
    """The error itself if it survives its way to the caller, else one that says as much."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its own __reduce__ or __init__ raises
        plain = RuntimeError(f"{type(error).__qualname__}: {error}")
        with_note(plain, "its own type cannot be pickled")
        return plain.with_traceback(error.__traceback__)
    return error


def _prepare(spec: ProcessSpec) -> None:
    # Before any user module is imported: libraries read these once.
    os.environ["OMP_NUM_THREADS"] = str(threads_here(spec.plan.threads))
    # Threads that wait by spinning take the cores from whoever has work: other roles, other jobs. For a moment they
    # do, as what follows comes at once: to wake a core costs .1 ms or more (a third of a step on two cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    if not spec.plan.accelerator and "CUDA_VISIBLE_DEVICES" not in spec.env:
        # Ray would show it all.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for path in reversed(spec.run.python_path):
        if path not in sys.path:
            sys.path.insert(0, path)
    # Relative paths in a configuration mean what they mean to the driver, where its folder exists here.
    if spec.run.working_dir.is_dir():
        os.chdir(spec.run.working_dir)
    if spec.log_file is not None:
        print(f"{spec.plan.name} writes to {spec.log_file}", flush=True)  # for who looks into Ray's own log
        spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(spec.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        # A log is UTF-8 wherever the driver writes to, and takes half of a surrogate pair too.
        options: dict[str, Any] = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
        sys.stdout = os.fdopen(1, "w", **options)
        sys.stderr = os.fdopen(2, "w", **options)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
