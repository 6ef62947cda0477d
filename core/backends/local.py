"""Local mode: the whole job in this process, one workload at a time, for breakpoints and quick tests. No Ray."""

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
    """Calls inside one process: each is carried out when it is made, and its outcome is the reference to it.

    Nothing here starts a thread: a call runs on the thread of who makes it, so `breakpoint()` works wherever it stands.
    What is passed is copied, as between processes.
    """

    def __init__(self) -> None:
        # A worker does one thing at a time; who is at work, and on which thread.
        self._busy: dict[str, int] = {}
        self._changed = threading.Condition()

    def send(self, member: Member, export: Export, share: Share) -> Outcome:
        """Carry out one call: the worker gets copies, and so does its caller."""
        args, kwargs = copied(share)

        def run() -> Any:
            return copied(member.handle.do("call", member.role, member.rank, export.name, *args, **kwargs))

        return self.carry_out(member.name, run)

    def carry_out(self, worker: str, run: Callable[[], Any]) -> Outcome:
        """Wait until the worker is free, and let it do this.

        Raises:
            RuntimeError: its own call waits for this one.
        """
        me = threading.get_ident()
        with self._changed:
            if self._busy.get(worker) == me:
                raise RuntimeError(
                    f"{worker} is asked by somebody for whom it is waiting (at work: {', '.join(self._busy)}), "
                    "so the result can never come; let the call return first"
                )
            self._changed.wait_for(lambda: worker not in self._busy)
            self._busy[worker] = me
        try:
            return Outcome(run())
        except Exception as failure:  # noqa: BLE001 - it is the answer
            return Outcome(error=failure, raised=True)
        finally:
            with self._changed:
                del self._busy[worker]
                self._changed.notify_all()


class LocalProcess(WorkerProcess):
    """A simulated worker process: while it works, environment and output of the real process are its own."""

    def __init__(
        self, spec: ProcessSpec, transport: LocalTransport, emit: Callable[[str, Any], None], out: TextIO
    ) -> None:
        super().__init__(spec, spec.run.config, transport, emit)
        self.printed = PrintedLines(spec.plan.name, lambda line: emit("info", line), spec.log_file, rest=out)
        self._own = _State()
        self._own.environment.update(spec.env)

    def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of it with its own environment variables, random numbers and default precision."""
        others = _State()
        self._own.enter()
        try:
            with redirect_stdout(self.printed):
                return getattr(self, method)(*args, **kwargs)
        finally:
            self._own = _State()
            others.enter()


class LocalBackend:
    """The stand-in for a cluster."""

    is_local = True

    def __init__(self, emit: Callable[[str, Any], None]) -> None:
        self._out = sys.stdout
        self._to_master = emit
        self._before: _State | None = None
        self._warnings = WarningsTo(lambda text: self._emit("info", text))
        self.transport = LocalTransport()

    def start(self, placement: Placement, placement_timeout: float, info: Callable[[str], None]) -> None:
        """Let the libraries use as many threads as the role with the most of them, where they have not counted yet."""
        del placement_timeout, info  # there is room at once
        self._before = _State()
        threads = max(threads_here(process.threads) for process in placement.hosts)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(threads)
        logging.getLogger().addHandler(self._warnings)

    def pickled(self, value: Any) -> Any:
        """A copy, for a process of its own."""
        return copied(value)

    def create(self, spec: ProcessSpec) -> LocalProcess:
        """Make one process."""
        return LocalProcess(spec, self.transport, self._emit, self._out)

    def _emit(self, kind: str, payload: Any) -> None:
        # The driver is no workload: what its observers print is not theirs.
        with redirect_stdout(self._out):
            self._to_master(kind, payload)

    def invoke(self, handle: LocalProcess, method: str, *args: Any) -> Outcome:
        """Call a method of the process itself; returns a reference."""
        worker = f"{args[0]}-{args[1]}" if method == "run" else f"{method} {id(handle)}"
        return self.transport.carry_out(worker, lambda: handle.do(method, *args))

    def kill(self, handle: LocalProcess) -> None:
        """Close its log; nothing else is to be ended."""
        handle.printed.close()

    def release(self) -> None:
        """Leave the process as it was."""
        if self._before is not None:
            self._before.enter()
        logging.getLogger().removeHandler(self._warnings)

    def stop(self) -> None:
        """Nothing was started."""

    def fault(self) -> str:
        """Nothing can die alone."""
        return ""

    def dead_nodes(self) -> set[str]:
        """There is one machine, and it lives."""
        return set()

    def room_missing(self) -> str:
        """There is always room."""
        return ""


class _State:
    """What libraries keep once per process, as it is now."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.python_random = random.getstate()
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        self.numpy_random = numpy.random.get_state() if numpy else None
        self.torch_random = torch.get_rng_state() if torch else None
        self.torch_dtype = torch.get_default_dtype() if torch else None
        self.torch_threads = torch.get_num_threads() if torch else None

    def enter(self) -> None:
        """Make it so."""
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update({k: v for k, v in self.environment.items() if os.environ.get(k) != v})
        random.setstate(self.python_random)
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy and self.numpy_random is not None:
            numpy.random.set_state(self.numpy_random)
        if torch:
            # Somebody else has imported torch: in a process of its own it would begin as a new generator does.
            fresh = self.torch_random is None
            torch.set_rng_state(torch.Generator().get_state() if fresh else self.torch_random)
            torch.set_default_dtype(torch.float32 if fresh else self.torch_dtype)
            if self.torch_threads not in (None, torch.get_num_threads()):
                torch.set_num_threads(self.torch_threads)


def copied(value: Any) -> Any:
    """What arrives when a value crosses processes: a copy, its arrays read-only. Functions and classes stay the same.

    Raises:
        TypeError: the value could not cross processes (it holds a lock, a socket, ...).
    """
    kept: list[Any] = []
    buffers: list[bytes] = []
    stream = io.BytesIO()

    def keep(obj: Any) -> int | None:
        if not isinstance(obj, FunctionType | ModuleType | type):
            return None
        kept.append(obj)
        return len(kept) - 1

    pickler = pickle.Pickler(stream, protocol=5, buffer_callback=lambda b: buffers.append(bytes(b.raw())))
    pickler.persistent_id = keep
    pickler.dump(value)
    stream.seek(0)
    unpickler = pickle.Unpickler(stream, buffers=buffers)
    unpickler.persistent_load = kept.__getitem__
    return unpickler.load()
