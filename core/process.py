"""A host that is a process of its own: its output goes to a log, and a side thread answers the master meanwhile."""

import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.control import ControlServer, Status, memory_bytes
from core.host import Host, HostReport, HostSpec
from core.members import Member, Transport
from core.roles import Role


class HostProcess(Host):
    """The process. Calls run on its main thread, but for async ones of roles that ask for concurrency."""

    def __init__(self, spec: HostSpec, ip: str, transport: Transport) -> None:
        _prepare(spec)
        config = pickle.loads(spec.config)
        super().__init__(spec, config, ip, transport, self._to_master)
        self._job_memory = 0
        answer: dict[str, Callable[..., Any]] = {
            "status": self._status,
            "stack": self._stack,
            "stop": self.request_stop,
            "lost": self._recovery.lose,
            "replay": self._replay,
            "replaced": lambda *member: self._recovery.replace(_member(*member)),
        }
        # Without a master nobody would end this process.
        self._control = ControlServer(ip, spec.key, answer, orphaned=lambda: os._exit(1))
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger().addHandler(WarningsTo(lambda text: self._control.send("say", text)))

    def _to_master(self, kind: str, payload: Any) -> None:
        self._control.send(kind, payload)

    def _status(self, job_memory: int) -> Status:
        self._job_memory = job_memory
        return Status(*self.doing(), memory_bytes())

    def job_memory(self) -> int:
        """Bytes that all processes of the job take, as the master has told."""
        return self._job_memory

    def prepare(self) -> HostReport:
        """As `Host.prepare`, with the address of the side thread."""
        run_id = self._spec.workers[0].identity.run_id
        print(f"{self._spec.name}: process {os.getpid()} on {self._ip} in run {run_id}", flush=True)
        report = super().prepare()
        report.control = self._control.address
        return report

    def _info(self, text: str) -> None:
        print(text, flush=True)
        super()._info(text)

    def _stack(self) -> tuple[str, str]:
        """Where the main thread is; all threads are written to the log."""
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return self._spec.name, "".join(traceback.format_stack(frame))

    def _replay(self, role: str, rank: int, handle: bytes, attempt: int) -> None:
        """Repeat on a replacement what this process had called on the lost worker, while the main thread continues."""
        member = _member(role, rank, handle, attempt)

        def repeat() -> None:
            error = None
            try:
                self._recovery.replay(member, self._transport)
            except Exception as failure:  # noqa: BLE001 - the master raises it
                error = failure
            self._control.send("replayed", ((self._spec.name, role, rank, attempt), error))

        threading.Thread(target=repeat, name="troupe-replay", daemon=True).start()


class WarningsTo(logging.Handler):
    """Shows the user the warnings of the project's and the user's own code; libraries only write to the log."""

    def __init__(self, info: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._info = info

    def emit(self, record: logging.LogRecord) -> None:
        if "site-packages" not in record.pathname and not record.pathname.startswith(sys.base_prefix):
            self._info(f"warning: {record.getMessage()}")


def python_path() -> tuple[str, ...]:
    """Folders that a host must search for the job's modules: those of this process that hold no installed packages."""
    here = [str(Path(entry).resolve()) for entry in sys.path]
    return tuple(entry for entry in here if "site-packages" not in entry and not entry.startswith(sys.base_prefix))


def _prepare(spec: HostSpec) -> None:
    # Before any user module is imported: libraries read these once.
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    # Threads that wait by spinning take the cores from whoever has work: other roles, other jobs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if spec.hides_devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for path in reversed(spec.python_path):
        if path not in sys.path:
            sys.path.insert(0, path)
    # Relative paths in a configuration mean what they mean to the driver, where its folder exists here.
    if spec.working_dir.is_dir():
        os.chdir(spec.working_dir)
    if spec.log_file is not None:
        spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(spec.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _member(role: str, rank: int, handle: bytes, attempt: int) -> Member:
    return Member(Role(role), rank, pickle.loads(handle), attempt)
