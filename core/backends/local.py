"""Local mode: the whole job in this process without Ray, one workload at a time. For breakpoints and quick tests."""

import io
import logging
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from types import FunctionType, ModuleType
from typing import Any, TextIO

from core.exports import Export
from core.members import Member, Outcome, Share, Transport
from core.plan import Placement
from core.printed import PrintedLines
from core.supervise.worker_process import ProcessSpec, WarningsTo, WorkerProcess, threads_here


class LocalTransport(Transport):
    """Transport inside one process. A call runs when it is sent, and its reference is the outcome.

    No thread is started: a call runs on the caller's thread, so `breakpoint()` works everywhere. Arguments and results
    are copied, as they are between processes.
    """

    def __init__(self) -> None:
        # Thread of each worker that is running. A worker runs one call at a time, as in a process of its own.
        self._busy: dict[str, int] = {}
        self._changed = threading.Condition()

    def send(self, member: Member, export: Export, share: Share) -> Outcome:
        """Run one call with copied arguments, and return its outcome with a copied result."""
        args, kwargs = copied(share)

        def run() -> Any:
            return copied(member.handle.do("call", member.role, member.rank, export.name, *args, **kwargs))

        return self.carry_out(member.name, run)

    def carry_out(self, worker: str, run: Callable[[], Any]) -> Outcome:
        """Wait until the worker is free, then run a function for it.

        Raises:
            RuntimeError: deadlock, because the worker waits for the call that makes this one.
        """
        thread = threading.get_ident()
        with self._changed:
            if self._busy.get(worker) == thread:
                raise RuntimeError(
                    f"deadlock: {worker} is called by a workload for whose result it waits (running: "
                    f"{', '.join(self._busy)}); let the first call return before this one"
                )
            self._changed.wait_for(lambda: worker not in self._busy)
            self._busy[worker] = thread
        try:
            return Outcome(run())
        except Exception as failure:  # noqa: BLE001 - any error of the method is its outcome
            return Outcome(error=failure, raised=True)
        finally:
            with self._changed:
                del self._busy[worker]
                self._changed.notify_all()


class LocalProcess(WorkerProcess):
    """Simulated worker process. While it runs, it replaces the environment and output of the real process."""

    def __init__(
        self, spec: ProcessSpec, transport: LocalTransport, emit: Callable[[str, Any], None], out: TextIO
    ) -> None:
        super().__init__(spec, spec.run.config, transport, emit)
        self.printed = PrintedLines(spec.plan.name, lambda line: emit("info", line), spec.log_file, rest=out)
        self._saved_state = _State()
        self._saved_state.environment.update(spec.env)

    def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method with the environment variables, random state and default dtype of this simulated process."""
        callers_state = _State()
        self._saved_state.restore()
        try:
            with redirect_stdout(self.printed):
                return getattr(self, method)(*args, **kwargs)
        finally:
            self._saved_state = _State()
            callers_state.restore()


class LocalBackend:
    """Backend that runs all processes of a job inside this process, as simulated processes."""

    is_local = True

    def __init__(self, emit: Callable[[str, Any], None]) -> None:
        self._out = sys.stdout
        self._to_master = emit
        self._before: _State | None = None
        self._warnings = WarningsTo(lambda text: self._emit("info", text))
        self.transport = LocalTransport()

    def start(self, placement: Placement, placement_timeout: float, info: Callable[[str], None]) -> None:
        """Set the number of threads of the libraries to the largest number of any role."""
        del placement_timeout, info  # nothing is reserved, so there is nothing to wait for
        self._before = _State()
        threads = max(threads_here(process.threads) for process in placement.hosts)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(threads)
        logging.getLogger().addHandler(self._warnings)

    def pickled(self, value: Any) -> Any:
        """Return a copy of a value for a simulated process."""
        return copied(value)

    def create(self, spec: ProcessSpec) -> LocalProcess:
        """Create one simulated process."""
        return LocalProcess(spec, self.transport, self._emit, self._out)

    def _emit(self, kind: str, payload: Any) -> None:
        # Observers run in the driver: what they print must not appear as the output of a workload.
        with redirect_stdout(self._out):
            self._to_master(kind, payload)

    def invoke(self, handle: LocalProcess, method: str, *args: Any) -> Outcome:
        """Call a method of the process itself, and return a reference to the outcome."""
        worker = f"{args[0]}-{args[1]}" if method == "run" else f"{method} {id(handle)}"
        return self.transport.carry_out(worker, lambda: handle.do(method, *args))

    def kill(self, handle: LocalProcess) -> None:
        """Close the log of a simulated process."""
        handle.printed.close()

    def release(self) -> None:
        """Restore the environment, random state and threads of this process."""
        if self._before is not None:
            self._before.restore()
        logging.getLogger().removeHandler(self._warnings)

    def stop(self) -> None:
        """Do nothing: this backend starts no cluster."""

    def fault(self) -> str:
        """Return an empty string: no part of this backend can die separately."""
        return ""

    def dead_nodes(self) -> set[str]:
        """Return an empty set: there are no other nodes."""
        return set()

    def room_missing(self) -> str:
        """Return an empty string: no resources are reserved."""
        return ""


class _State:
    """Snapshot of the process-wide state of the libraries."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.python_random = random.getstate()
        self.numpy_random = self.torch_defaults = self.torch_threads = None
        # Only libraries that are imported already have a state. To import torch here would take seconds.
        if numpy := sys.modules.get("numpy"):
            self.numpy_random = numpy.random.get_state()
        if torch := sys.modules.get("torch"):
            self.torch_defaults = (torch.get_rng_state(), torch.get_default_dtype())
            self.torch_threads = torch.get_num_threads()

    def restore(self) -> None:
        """Restore the process to this snapshot."""
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update({k: v for k, v in self.environment.items() if os.environ.get(k) != v})
        random.setstate(self.python_random)
        numpy = sys.modules.get("numpy")
        if numpy and self.numpy_random is not None:
            numpy.random.set_state(self.numpy_random)
        if torch := sys.modules.get("torch"):
            # If another workload has imported torch since, this one starts with the state of a new process.
            random_state, dtype = self.torch_defaults or (torch.Generator().get_state(), torch.float32)
            torch.set_rng_state(random_state)
            torch.set_default_dtype(dtype)
            if self.torch_threads not in (None, torch.get_num_threads()):
                torch.set_num_threads(self.torch_threads)


def copied(value: Any) -> Any:
    """Return a copy of a value as another process would receive it, with read-only arrays.

    Functions, modules and classes are passed by reference.

    Raises:
        TypeError: the value cannot be pickled (it holds a lock, a socket, ...).
    """
    shared: list[Any] = []
    buffers: list[bytes] = []
    stream = io.BytesIO()

    def share(obj: Any) -> int | None:
        if not isinstance(obj, FunctionType | ModuleType | type):
            return None
        shared.append(obj)
        return len(shared) - 1

    pickler = pickle.Pickler(stream, protocol=5, buffer_callback=lambda b: buffers.append(bytes(b.raw())))
    pickler.persistent_id = share
    pickler.dump(value)
    stream.seek(0)
    unpickler = pickle.Unpickler(stream, buffers=buffers)
    unpickler.persistent_load = shared.__getitem__
    return unpickler.load()
