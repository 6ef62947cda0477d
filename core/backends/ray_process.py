"""Worker process as a Ray actor, with a log file and a control thread for requests of the master."""

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
    load_object,
    threads_here,
)


class RayProcess(WorkerProcess):
    """The actor class. Requests of the master run in the order in which they were sent, as do calls to each workload.

    A process with one workload runs all of them on its main thread. If several workloads share a process, each has a
    thread, so that they can call each other, but only one thread runs at a time.
    """

    def __init__(self, spec: ProcessSpec, transport: Transport) -> None:
        _prepare(spec)
        super().__init__(spec, pickle.loads(spec.run.config), transport, self._to_master)
        # A function by its path, so that a plug-in can choose among the interfaces of the machine.
        self._ip = load_object(os.environ.get("TROUPE_ADDRESS_FROM", "ray.util:get_node_ip_address"))()
        # Rendezvous ports of the roles whose rank 0 is in this process.
        self._ports: dict[Role, socket.socket] = {}
        self._turn = threading.RLock()
        self._job_memory = 0
        answer: dict[str, Callable[..., Any]] = {
            "status": self._status,
            "stack": self._stack,
            "stop": self.request_stop,
            "tidy": self._tidy,
            "lost": self._directory.lose,
            "replaced": lambda member, rank: self._directory.replace(pickle.loads(member), rank),
        }
        # Without the callback this process would outlive a dead master, because only the master ends it.
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
        """Remove the run's folder in this machine's shared memory. Return True, the reply to the master."""
        shutil.rmtree(self._spec.run.shared_dir, ignore_errors=True)
        return True

    def _end(self) -> None:
        # Only leaves the folder: other processes of the run may still use it, if the master has lost this one alone.
        leave_shared(self._spec.run.shared_dir)
        os._exit(1)

    def job_memory(self) -> int:
        """Return the memory of all processes of the job in bytes, as last sent by the master."""
        return self._job_memory

    def report(self) -> ProcessReport:
        """Report the address and Ray's node id. Several nodes may have one address.

        Reserves a port for each role whose rank 0 is here, so that no other job on this machine gets the port.
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
            # By length first: as text, "10" would come before "2".
            devices=sorted(sorted(ray.get_runtime_context().get_accelerator_ids().get("GPU", [])), key=len),
        )

    def packed(self, exports: dict[str, Export]) -> bytes:
        """Return the exports pickled. Unpickling may import modules for seconds, and few processes need them."""
        return cloudpickle.dumps(exports)

    def call_named(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method named by the task, such as `ACTOR.update`. Ray's tools show this name."""
        name = ray.get_runtime_context().get_task_name()
        assert name is not None
        role, _, method = name.partition(".")
        key, worker = next((key, worker) for key, worker in self._workers.items() if key[0] == role)
        export = worker.exports[method][0]
        try:
            with contextlib.nullcontext() if export.concurrent else self._turn:
                if export.replay and self._spec.run.recovers:
                    return self._call_and_keep((*key, method), *args, **kwargs)
                return self.call(*key, method, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised again, in a form that can be pickled
            raise _picklable(error) from error.__cause__

    def _call_and_keep(self, key: CallKey, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call, and send it to the master after it has succeeded.

        The master keeps the last call of each method and repeats it in a replacement. A call during which the process
        dies is not kept, because its caller sends it again.
        """
        kept = (self._spec.attempt, next(self._count), cloudpickle.dumps((args, kwargs)))
        result = self.call(*key, *args, **kwargs)
        self._control.send("kept", (key, kept))
        return result

    def repeat(self, calls: dict[CallKey, KeptCall]) -> None:
        """Repeat the kept calls of the process that this one replaces, in their original order."""
        for key, (_, _, pickled) in sorted(calls.items(), key=operator.itemgetter(1)):
            args, kwargs = pickle.loads(pickled)
            self.call(*key, *args, **kwargs)

    def run(self, role: Role, rank: int) -> None:
        """Run a workload's `run()`. Other workloads of the process run while it waits for results."""
        with self._turn:
            super().run(role, rank)

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Release the turn of this thread, if it has it, while the block waits."""
        with contextlib.ExitStack() as turn:
            with contextlib.suppress(RuntimeError):  # this thread does not have it
                self._turn.release()
                turn.callback(self._turn.acquire)
            yield

    def _stack(self) -> str:
        """Return the stack of the main thread. The stacks of all threads are written to the log."""
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return "".join(traceback.format_stack(frame))


def kept_port() -> socket.socket:
    """Return a socket that reserves a free port on all addresses.

    While it is open, the system gives the port to no other program. A program that sets SO_REUSEADDR, as torch does,
    can still listen on it.
    """
    kept = socket.socket()
    kept.bind(("", 0))
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return kept


def _picklable(error: Exception) -> Exception:
    """Return the error itself if it can be pickled, else a RuntimeError with its message."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - the error's __reduce__ or __init__ may raise anything
        plain = RuntimeError(f"{type(error).__qualname__}: {error}")
        with_note(plain, "its original type cannot be pickled")
        return plain.with_traceback(error.__traceback__)
    return error


def _prepare(spec: ProcessSpec) -> None:
    # Set before any user module is imported, because libraries read these variables once.
    os.environ["OMP_NUM_THREADS"] = str(threads_here(spec.plan.threads))
    # Threads that spin while they wait take cores from other roles and jobs, so they sleep. They spin for a moment
    # first: waking a core takes 0.1 ms or more, which added up to a third of a step on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    if not spec.plan.accelerator and "CUDA_VISIBLE_DEVICES" not in spec.env:
        # Ray would make all devices visible to a process that has reserved none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for path in reversed(spec.run.python_path):
        if path not in sys.path:
            sys.path.insert(0, path)
    # Relative paths in a configuration are resolved as in the driver, if its working directory exists here.
    if spec.run.working_dir.is_dir():
        os.chdir(spec.run.working_dir)
    if spec.log_file is not None:
        print(f"{spec.plan.name} writes to {spec.log_file}", flush=True)  # a pointer for readers of Ray's own log
        spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(spec.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        # UTF-8 whatever the locale is. A lone surrogate is escaped, else printing it would raise.
        options: dict[str, Any] = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
        sys.stdout = os.fdopen(1, "w", **options)
        sys.stderr = os.fdopen(2, "w", **options)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
