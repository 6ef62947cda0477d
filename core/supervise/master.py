"""The master runs inside the driver: it starts a job's processes, replaces what dies, and leaves nothing behind."""

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
from typing import Any

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
    """One run of one job.

    Whoever finds out that a process is gone (the end of its connection, an error of Ray in any call, Ray's list of
    nodes, a time limit) says so in one place, `WatchedProcess.lose`, and `_supervise` sees to it.

    `runs`: whether it runs the job to its end, as `run` does; else this process drives it inside `running`.
    """

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
            began=time.time() if began is None else began,
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
        """Start, drive, recover, clean up."""
        began = time.monotonic()
        status, error, trace = "finished", "", ""
        self._catch_signals()
        try:
            self._until_done()
            status = "finished" if self._stop_asked is None else "stopped"
        except KeyboardInterrupt:
            status = "stopped"
        except Exception as failure:  # noqa: BLE001 - whatever fails is the result
            status = "failed"
            error, trace = self._explain(failure)
        finally:
            # From here on a signal changes nothing: what is left takes seconds, and must not be left behind.
            self._cleaning_up = True
            self._clean_up()
            self._signals.close()
        error = error or ("stopped by the user" if status == "stopped" else "")
        self._watch.event("end", text=f"{status}: {error}" if error else status)
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
                line, _ = self._explain(loss)
                if self._stop_asked is not None:
                    _print_line(f"stopped without a last save: {line}")
                    raise KeyboardInterrupt from loss
                # In local mode only an error of a role itself comes here, and it would come again.
                limit = 0 if self._backend.is_local else self._job.max_restarts
                if self._attempt > limit:
                    if limit:
                        with_note(loss, f"after {self._attempt} attempts; max_restarts={limit}")
                    raise
                self._attempt += 1
                self._output = ""
                self._watch.event("restart", text=line)
                _print_line(f"{line}; all starts again, attempt {self._attempt} of {self._job.max_restarts + 1}")
                self._end_processes()
                if self._backend.fault():  # perhaps seen first in the workers that died of it
                    self._backend.stop()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the roles; this process takes the driver's place until the block ends."""
        ended = threading.Event()
        hearing = threading.Thread(target=self._hear, args=(ended,), name="troupe-watch", daemon=True)
        try:
            self._start()
            me = Identity(self._facts.job, self._run_id, self._facts.began, Role("DRIVER"), 0, 1)
            directory = Directory()
            directory.meet(self._coming.roles)
            context = WorkloadContext(
                me, self._job.config, directory, self._backend.transport, self._watch.take_in, self._shared_dir
            )
            # A process that nobody hears stops as soon as it has said too much.
            hearing.start()
            with entered(context):
                yield
        finally:
            ended.set()
            if hearing.is_alive():
                hearing.join()
            self._clean_up()

    def _hear(self, ended: threading.Event) -> None:
        while not ended.wait(_POLL_S):
            self._watch.poll()

    # --- driving

    def _start(self) -> None:
        sweep_shared()
        claim_shared(self._shared_dir)
        try:
            self._backend.start(self._job.placement, self._job.placement_timeout, _print_line)
        except SystemExit as stop:  # of Ray's own handler of SIGTERM, until ours takes its place again
            raise KeyboardInterrupt from stop
        if self._runs:
            self._set_handlers()  # after Ray, which sets some of its own
        self._coming = BringUp(self._job, self._facts, self._backend, self._watch, self._starts)
        while not self._coming.all_up:
            self._supervise(pause=_START_POLL_S)
        self._watch.event("start", text=f"attempt {self._attempt}")

    def _drive(self) -> None:
        """Run the trainer to its end; a job without one runs every workload that has a `run()`."""
        workers = [
            (process, Role(role), rank) for process in self._watch.processes for role, rank in process.plan.workers
        ]
        driving = [worker for worker in workers if worker[1] == Role.TRAINER]
        if not driving:
            driving = [(process, role, rank) for process, role, rank in workers if self._coming.roles[role].has_run]
        self._driving = {process for process, _, _ in driving}
        for process in self._driving:
            process.expendable = False  # nobody could tell its replacement how far it had come
        for process, role, rank in workers:
            if self._coming.roles[role].has_run and (process, role, rank) not in driving:
                self._backend.invoke(process.handle, "start_run", role, rank)
        self._collect(
            [(process, self._backend.invoke(process.handle, "run", role, rank)) for process, role, rank in driving]
        )
        self._ending = True
        living = [process for process in self._watch.processes if not process.lost]
        self._collect([(process, self._backend.invoke(process.handle, "teardown")) for process in living])
        self._watch.poll()

    def _collect(self, calls: list[tuple[WatchedProcess, Any]]) -> None:
        """Wait for all, tending every process meanwhile; the first failure or fatal death is raised."""
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
                # A death is the cause of what its peers complain about, so it is looked for first.
                self._supervise(_BLAME_WITHIN_S)
                raise with_note(outcome.error, f"in {process.plan.name}")
            self._supervise()

    # --- tending

    def _supervise(self, within: float = 0.0, pause: float = 0.0) -> None:
        """See to everything that happens beside the calls: who died, who hangs, who asked for the end.

        Args:
            within: seconds to wait for a death.
            pause: seconds to wait for those on their way up.
        """
        deadline = time.monotonic() + within
        while True:
            self._watch.poll()
            for process, how in self._heard("death"):
                process.lose(how)
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
        for _, text in self._heard("failed"):
            raise RuntimeError(text)
        if self._ending:
            return
        fatal = [process for process in lost if not process.expendable]
        if fatal:
            self._output = fatal[0].last_lines()
            others = f"; gone too: {', '.join(h.plan.name for h in fatal[1:])}" if fatal[1:] else ""
            raise WorkerDied(fatal[0].blame() + others)
        for process in lost:
            self._output = process.last_lines()
            self._coming.start_again(process, self._end)
        self._coming.advance(pause)

    def _heard(self, kind: str) -> list[tuple[WatchedProcess, str]]:
        """Processes of which others say something, if they have not been replaced yet."""
        return [
            (process, text)
            for role, rank, attempt, text in self._watch.take(kind)
            for process in self._watch.processes
            if process.attempt == attempt and (role, rank) in process.plan.workers
        ]

    def _end_hung(self) -> None:
        hung = self._heard("hung")
        if limit := self._job.stall_timeout:
            hung += self._watch.stalled(limit, self._driving, self._coming.all_up)
            hung += self._coming.late(max(limit, self._job.placement_timeout))
        for process, why in hung:
            if process.lost or not self._facts.recovers:
                continue
            stack = self._watch.stack(process)
            innermost = stack.strip().splitlines()[-2].strip() if stack else "an unknown place"
            process.fault = f"{why}; it was at {innermost}"
            self._watch.event("hung", process.plan.name, process.fault)
            if stack:
                _print_line(f"{process.plan.name} hangs, here:\n{stack.rstrip()}")
            self._end(process)
            process.lose(process.fault)

    def _pass_on_stop(self) -> None:
        if self._stop_asked is None:
            return
        if not self._stop_passed_on:
            self._stop_passed_on = True
            self._watch.event("stop")
            _print_line("stopping at the next safe place, with what is to be kept; Ctrl-C again stops at once")
            for process in self._driving:
                process.send("stop")
                if self._backend.is_local:
                    process.handle.request_stop()
        if time.monotonic() - self._stop_asked > self._job.stop_grace:
            raise KeyboardInterrupt

    def _explain(self, failure: BaseException) -> tuple[str, str]:
        """One line for the person, and the whole story."""
        notes = getattr(failure, "__notes__", [])
        short = "; ".join(note for note in notes if "\n" not in note)
        line = first_line(failure).removeprefix("WorkerDied: ").removeprefix("ResultLost: ")
        return line + (f" ({short})" if short else ""), "".join(traceback.format_exception(failure))

    # --- ending

    def _end(self, process: WatchedProcess) -> None:
        """End a process, also one that obeys nobody or cannot be reached."""
        process.signal(signal.SIGKILL)  # one that is stopped obeys nobody else
        with contextlib.suppress(Exception):  # a process that is gone already needs no end
            self._backend.kill(process.handle)
        if process.link is not None:
            process.link.close()  # should it live on, it ends itself as soon as it notices

    def _end_processes(self) -> None:
        """End all processes, and give back what they were given; the cluster stays."""
        processes = self._watch.processes
        # One process of each other machine removes what the run has in its shared memory.
        others = {h.report.machine: h for h in processes if h.report and h.link and not h.lost and not h.is_here}
        self._watch.ask("tidy", list(others.values()), _TIDY_WITHIN_S)
        for process in processes:  # by Ray: of a process that ends by itself it tells as of a crash
            with contextlib.suppress(Exception):  # a process that is gone already needs no end
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
        """Let SIGTERM end a run as Ctrl-C does, while it lasts; the first of them lets the driver save its work."""
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
            self._pass_on_stop()  # this thread is at work for the trainer, and tends nothing meanwhile
