"""The master runs in the driver. It starts the processes of a job, replaces dead ones, and cleans up at the end."""

import contextlib
import functools
import secrets
import shutil
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from core.backends import BackendName, make_backend
from core.context import Identity, WorkloadContext, entered
from core.errors import WorkerDied, WorkerTimeout, first_line, with_note
from core.members import Directory
from core.observers import Observer
from core.plan import JobResult, JobSpec
from core.roles import Role
from core.shared_memory import claim_shared, shared_folder, sweep_shared
from core.supervise.bring_up import BringUp
from core.supervise.watch import Watch, WatchedProcess
from core.supervise.worker_process import RunFacts, python_path

_POLL_S = 0.2
_START_POLL_S = 0.05
_BLAME_WITHIN_S = 1.0
_GONE_WITHIN_S = 10.0
_TIDY_WITHIN_S = 5.0
_NODES_EVERY_S = 2.0


_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_print_line = functools.partial(print, flush=True)


class Master:
    """Master of one run of one job.

    Every detector of a dead process (the end of its connection, an error of Ray in a call, Ray's list of nodes, a
    timeout) calls `WatchedProcess.lose`, and only `_supervise` reacts to it.

    Args:
        job: the job.
        name: name of the job, for messages.
        log_dir: folder for the output of each process. None leaves the output to Ray.
        began: start time of the run in seconds since the epoch. Default: now.
        observers: callbacks for events.
        backend: "ray" or "local".
        runs: True if `run` runs the job to its end. False if this process drives it inside `running`.
    """

    BRING_UP: ClassVar[type[BringUp]] = BringUp
    """Class that starts the processes of an attempt."""

    def __init__(
        self,
        job: JobSpec,
        name: str,
        log_dir: Path | None = None,
        began: float | None = None,
        observers: Sequence[Observer] = (),
        backend: BackendName = "ray",
        runs: bool = True,
    ) -> None:
        self._job = job
        self._run_id = secrets.token_hex(4)
        self._watch = Watch(list(observers), _print_line, in_this_process=backend == "local")
        self._backend = make_backend(backend, self._run_id, self._watch.on_event)
        self._shared_dir = shared_folder(self._run_id)
        self._facts = RunFacts(
            job=name,
            run_id=self._run_id,
            began=time.time() if began is None else began,  # not `began or ...`: a start at 0 is valid
            config=self._backend.pickled(job.config),
            key=secrets.token_bytes(32),
            python_path=python_path(),
            working_dir=Path.cwd(),
            shared_dir=self._shared_dir,
            log_dir=log_dir,
            collocations=job.collocations,
            reports_calls=bool(observers) or job.stall_timeout > 0 or self._backend.is_local,
            recovers=runs and not self._backend.is_local,
        )
        self._starts: Counter[str] = Counter()
        self._runs = runs
        self._ending = self._stop_passed_on = self._cleaning_up = False
        self._attempt = 1
        self._driving: set[WatchedProcess] = set()
        self._stop_asked: float | None = None
        self._look_at_nodes_at = 0.0
        self._output = ""
        self._signals = contextlib.ExitStack()

    def run(self) -> JobResult:
        """Run the job to its end: start, drive, recover, clean up."""
        began = time.monotonic()
        status = "stopped"
        error = trace = ""
        self._catch_signals()
        try:
            self._until_done()
            if self._stop_asked is None:
                status = "finished"
        except KeyboardInterrupt:
            pass  # the user has stopped the run
        except Exception as failure:  # noqa: BLE001 - any failure is the result of the run
            status = "failed"
            error, trace = self._explain(failure)
        finally:
            # From here on signals are ignored: the clean-up takes seconds, and a signal would leave processes behind.
            self._cleaning_up = True
            self._clean_up()
            self._signals.close()
        if status == "stopped":
            error = "stopped by the user"
        self._watch.event("end", text=": ".join(filter(None, [status, error])))
        return JobResult(
            run_id=self._run_id,
            status=status,
            error=error,
            traceback=trace,
            output=self._output,
            attempt=self._attempt,
            elapsed=time.monotonic() - began,
            peak_memory_bytes=self._watch.peak_memory,
        )

    def _until_done(self) -> None:
        while True:
            try:
                self._start()
                self._drive()
                return
            except (WorkerDied, WorkerTimeout) as loss:
                cause, _ = self._explain(loss)
                if self._stop_asked is not None:
                    _print_line(f"stopped without a final save: {cause}")
                    raise KeyboardInterrupt from loss
                # In local mode only an error raised by a role itself gets here, and a restart would raise it again.
                limit = 0 if self._backend.is_local else self._job.max_restarts
                if self._attempt > limit:
                    if limit:
                        with_note(loss, f"after {self._attempt} attempts; max_restarts={limit}")
                    raise
                self._attempt += 1
                self._output = ""
                self._watch.event("restart", text=cause)
                _print_line(f"{cause}; the job restarts, attempt {self._attempt} of {self._job.max_restarts + 1}")
                self._end_processes()
                # The next attempt needs a new cluster if this one has a fault. Workers may have died of it first.
                if self._backend.fault():
                    self._backend.stop()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager that starts the roles. Inside the block this process calls them, as a trainer would."""
        ended = threading.Event()
        poller = threading.Thread(target=self._poll_until, args=(ended,), name="troupe-watch", daemon=True)
        try:
            self._start()
            identity = Identity(self._facts.job, self._run_id, self._facts.began, Role("DRIVER"), 0, 1)
            directory = Directory()
            directory.add_entries(self._coming.roles)
            context = WorkloadContext(
                identity, self._job.config, directory, self._backend.transport, self._watch.take_in, self._shared_dir
            )
            # Without polling, a process would block as soon as its messages fill the buffer of the connection.
            poller.start()
            with entered(context):
                yield
        finally:
            ended.set()
            if poller.is_alive():
                poller.join()
            self._clean_up()

    def _poll_until(self, ended: threading.Event) -> None:
        while not ended.wait(_POLL_S):
            self._watch.poll()

    # --- driving

    def _start(self) -> None:
        sweep_shared()
        claim_shared(self._shared_dir)
        try:
            self._backend.start(self._job.placement, self._job.placement_timeout, _print_line)
        except SystemExit as stop:  # raised by Ray's handler of SIGTERM, which replaces ours during ray.init
            raise KeyboardInterrupt from stop
        if self._runs:
            self._set_handlers()  # again, because ray.init has replaced them
        self._coming = self.BRING_UP(self._job, self._facts, self._backend, self._watch, self._starts)
        while not self._coming.have_all_started:
            self._supervise(pause=_START_POLL_S)
        self._watch.event("start", text=f"attempt {self._attempt}")

    def _drive(self) -> None:
        """Run the trainer to its end. A job without a trainer runs every workload that has a `run()`."""
        workers = [(p, Role(role), rank) for p in self._watch.processes for role, rank in p.plan.workers]
        driving = [worker for worker in workers if worker[1] == Role.TRAINER]
        if not driving:
            driving = [(process, role, rank) for process, role, rank in workers if self._coming.roles[role].has_run]
        self._driving = {process for process, _, _ in driving}
        for process in self._driving:
            process.expendable = False  # a replacement would start from the beginning: its progress is not known
        for process, role, rank in workers:
            if self._coming.roles[role].has_run and (process, role, rank) not in driving:
                self._backend.invoke(process.handle, "start_run", role, rank)
        self._collect([(p, self._backend.invoke(p.handle, "run", role, rank)) for p, role, rank in driving])
        self._ending = True
        living = [process for process in self._watch.processes if not process.lost]
        self._collect([(process, self._backend.invoke(process.handle, "teardown")) for process in living])
        self._watch.poll()

    def _collect(self, calls: list[tuple[WatchedProcess, Any]]) -> None:
        """Wait for all calls, and supervise the processes meanwhile. Raise the first failure or fatal death."""
        waiting = {reference: process for process, reference in calls}
        while waiting:
            for reference in self._backend.transport.wait(list(waiting), _POLL_S, len(waiting)):
                process = waiting.pop(reference)
                outcome = self._backend.transport.outcome(reference)
                died = isinstance(outcome.error, WorkerDied) and not outcome.raised
                if died:
                    process.lose(str(outcome.error))
                if outcome.error is None or (died and self._ending):
                    continue
                # The error may be the consequence of another worker's death, which is then the error to report.
                self._supervise(_BLAME_WITHIN_S)
                raise with_note(outcome.error, f"in {process.plan.name}")
            self._supervise()

    # --- supervision

    def _supervise(self, within: float = 0.0, pause: float = 0.0) -> None:
        """Handle events outside of calls: dead workers, hung workers, stop requests.

        Args:
            within: seconds to wait for a death.
            pause: seconds to wait for starting processes.
        """
        deadline = time.monotonic() + within
        while True:
            self._watch.poll()
            for process, evidence in self._reported("death"):
                process.lose(evidence)
            if self._watch.silent() and time.monotonic() >= self._look_at_nodes_at:
                self._look_at_nodes_at = time.monotonic() + _NODES_EVERY_S
                self._coming.look_at_nodes()
            self._end_hung()
            self._pass_on_stop()
            lost = [process for process in self._watch.processes if process.lost]
            if lost or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        if fault := self._backend.fault():
            raise WorkerDied(fault)
        for _, text in self._reported("failed"):
            raise RuntimeError(text)
        if self._ending:
            return
        fatal = [process for process in lost if not process.expendable]
        if fatal:
            self._output = fatal[0].last_lines()
            raise WorkerDied("; also died: ".join([fatal[0].blame(), *(process.plan.name for process in fatal[1:])]))
        for process in lost:
            self._output = process.last_lines()
            self._coming.start_again(process, self._end)
        self._coming.advance(pause)

    def _reported(self, kind: str) -> list[tuple[WatchedProcess, str]]:
        """Return (process, text) of the messages of a kind, except those about processes replaced since."""
        return [
            (process, text)
            for role, rank, attempt, text in self._watch.take(kind)
            for process in self._watch.processes
            if process.attempt == attempt and (role, rank) in process.plan.workers
        ]

    def _end_hung(self) -> None:
        hung = self._reported("hung")
        if limit := self._job.stall_timeout:
            hung += self._watch.stalled(limit, self._driving, self._coming.have_all_started)
            hung += self._coming.late(max(limit, self._job.placement_timeout))
        for process, why in hung:
            if process.lost or not self._facts.recovers:
                continue
            stack = self._watch.stack(process)
            innermost = "an unknown place"
            if stack:
                innermost = stack.strip().splitlines()[-2].strip()
                _print_line(f"{process.plan.name} hangs at:\n{stack.rstrip()}")
            process.fault = f"{why}; it was at {innermost}"
            self._watch.event("hung", process.plan.name, process.fault)
            self._end(process)
            process.lose(process.fault)

    def _pass_on_stop(self) -> None:
        if self._stop_asked is None:
            return
        if not self._stop_passed_on:
            self._stop_passed_on = True
            self._watch.event("stop")
            _print_line("stopping at the next safe point, after saving; Ctrl-C again stops at once")
            for process in self._driving:
                process.send("stop")
                if self._backend.is_local:
                    process.handle.request_stop()
        if time.monotonic() - self._stop_asked > self._job.stop_grace:
            raise KeyboardInterrupt

    def _explain(self, failure: BaseException) -> tuple[str, str]:
        """Return a one-line explanation of a failure, and its traceback."""
        notes = getattr(failure, "__notes__", [])
        explanation = first_line(failure).removeprefix("WorkerDied: ").removeprefix("ResultLost: ")
        if short := "; ".join(note for note in notes if "\n" not in note):
            explanation += f" ({short})"
        return explanation, "".join(traceback.format_exception(failure))

    # --- the end

    def _end(self, process: WatchedProcess) -> None:
        """Kill a process, even if it is stopped or unreachable."""
        process.signal(signal.SIGKILL)  # the only signal that ends a stopped process
        with contextlib.suppress(Exception):  # the process has ended already, which is the aim
            self._backend.kill(process.handle)
        if process.link is not None:
            process.link.close()  # a process that is still alive ends itself when its connection is closed

    def _end_processes(self) -> None:
        """Kill all processes and release their resources. The cluster stays."""
        processes = self._watch.processes
        # On each other machine one process removes the run's shared memory, which the driver cannot reach.
        remote = {p.report.machine: p for p in processes if p.report and p.link and not p.lost and not p.is_local}
        self._watch.ask("tidy", list(remote.values()), _TIDY_WITHIN_S)
        for process in processes:  # killed through Ray, which logs processes that end by themselves as crashes
            with contextlib.suppress(Exception):  # the process has ended already, which is the aim
                self._backend.kill(process.handle)
        deadline = time.monotonic() + _GONE_WITHIN_S
        reachable = [process.link for process in processes if process.link is not None and not process.lost]
        while any(link.alive for link in reachable) and time.monotonic() < deadline:
            self._watch.poll()
            if self._backend.fault():
                break
            time.sleep(0.02)
        for process in processes:
            self._end(process)
        self._watch.processes.clear()
        self._watch.messages.clear()
        self._driving.clear()
        self._ending = False
        self._backend.release()
        shutil.rmtree(self._shared_dir, ignore_errors=True)

    def _clean_up(self) -> None:
        self._end_processes()
        self._backend.stop()

    def _catch_signals(self) -> None:
        """Handle SIGTERM and Ctrl-C for the duration of the run. The first of them lets the driver save its state."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._signals.callback(signal.signal, number, signal.getsignal(number))
        self._set_handlers()

    def _set_handlers(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._interrupt)

    def _interrupt(self, *_: Any) -> None:
        if self._cleaning_up:
            return
        may_wait = self._driving and not self._ending and self._job.stop_grace > 0
        if not may_wait or self._stop_asked is not None:
            raise KeyboardInterrupt
        self._stop_asked = time.monotonic()
        if self._backend.is_local:
            self._pass_on_stop()  # this thread runs the trainer, so `_supervise` would not be called before its end
