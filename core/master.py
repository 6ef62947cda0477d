"""The master runs inside the driver: it starts a job's processes, replaces what dies, and leaves nothing behind."""

import contextlib
import functools
import math
import secrets
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from core.backends import BackendName, make_backend
from core.context import Identity, WorkloadContext, entered
from core.control import ControlLink
from core.errors import WorkerDied, WorkerTimeout, with_note
from core.host import HostSpec, WorkerSpec
from core.members import Directory, Member
from core.observers import Observer
from core.plan import JobResult, JobSpec
from core.process import python_path
from core.roles import Role
from core.shared_memory import claim_shared, shared_folder, sweep_shared
from core.watch import Watch, WatchedHost, directory_of, kill_local, local_ranks

_DEVICES = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.2
_BLAME_WITHIN_S = 1.0
_GONE_WITHIN_S = 10.0


_print_line = functools.partial(print, flush=True)


class _AttemptLost(WorkerDied):
    """Somebody died whom nobody can stand in for."""


class _GaveUp(_AttemptLost):
    """A role has used up its restarts."""


class Master:
    """One run of one job."""

    def __init__(
        self,
        job: JobSpec,
        name: str,
        log_dir: Path | None = None,
        address: str | None = None,
        began: float | None = None,
        observers: Sequence[Observer] = (),
        backend: BackendName = "ray",
    ) -> None:
        self._job = job
        self._name = name
        self._began = time.time() if began is None else began
        self._log_dir = log_dir
        self._run_id = secrets.token_hex(4)
        self._key = secrets.token_bytes(32)
        self._watch = Watch(list(observers), _print_line)
        self._backend = make_backend(backend, self._run_id, address, self._watch.on_event)
        self._is_observed = bool(observers) or job.stall_timeout > 0 or self._backend.is_local
        self._runs = self._recovers = self._ending = self._stop_told = False
        self._attempt = 1
        self._starts: dict[str, int] = {}
        self._replaced: dict[str, int] = {}
        self._driving: list[WatchedHost] = []
        self._stop_asked: float | None = None
        self._output = ""
        self._signals = contextlib.ExitStack()
        self._roles: Directory = {}
        self._rendezvous: dict[Role, tuple[str, int]] = {}
        self._local: dict[tuple[Role, int], tuple[int, int]] = {}
        self._shared_dir = shared_folder(self._run_id)

    def run(self) -> JobResult:
        """Start, drive, recover, clean up."""
        began, self._runs, self._recovers = time.monotonic(), True, not self._backend.is_local
        status, error, trace = "finished", "", ""
        try:
            try:
                self._until_done()
                status = "finished" if self._stop_asked is None else "stopped"
            except KeyboardInterrupt:
                status = "stopped"
            except Exception as failure:  # noqa: BLE001 - whatever fails is told in the result
                status, (error, trace) = "failed", self._explain(failure)
        finally:
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
            except _GaveUp:
                raise
            except (WorkerDied, WorkerTimeout) as loss:
                if self._stop_asked is not None:
                    raise KeyboardInterrupt from loss
                line, _ = self._explain(loss)
                # In local mode only a late call comes here: in the same process it would take as long again.
                limit = self._job.max_restarts if self._recovers else 0
                if self._attempt > limit:
                    if limit:
                        with_note(loss, f"after {self._attempt} attempts; max_restarts={limit}")
                    raise
                self._attempt, self._output = self._attempt + 1, ""
                self._watch.event("restart", text=line)
                _print_line(f"{line}; all starts again, attempt {self._attempt} of {self._job.max_restarts + 1}")
                self._end_processes()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the roles; this process takes the driver's place until the block ends."""
        try:
            self._start()
            me = Identity(self._name, self._run_id, self._began, Role("DRIVER"), 0, 1)
            context = WorkloadContext(
                me, self._job.config, self._roles, self._backend.transport, _print_line, self._shared_dir
            )
            with entered(context):
                yield
        finally:
            self._clean_up()

    # --- starting

    def _start(self) -> None:
        sweep_shared()
        claim_shared(self._shared_dir)
        self._backend.start(self._job.placement)
        if self._runs and self._attempt == 1:
            self._signals.enter_context(self._stop_signals())  # after Ray, which sets a handler of its own
        for plan in self._job.placement.hosts:
            log_file = self._log_dir / f"{plan.name.lower()}.log" if self._log_dir else None
            runs = all(self._job.roles[role].kind == "run" and role != Role.TRAINER for role, _ in plan.workers)
            self._watch.hosts.append(WatchedHost(plan, log_file, expendable=runs and self._recovers))
        hosts = self._watch.hosts
        for host in hosts:
            self._create(host)
        for host, report in zip(hosts, self._ask(hosts, "prepare"), strict=True):
            self._meet(host, report) if report is not None else self._again(host, self._bring_up)
        self._rendezvous = {
            role: (host.report.ip, port) for host in hosts if host.report for role, port in host.report.ports.items()
        }
        self._roles, self._local = directory_of(self._job.roles, hosts), local_ranks(hosts)
        # The driver comes last: it is made with the others' exports in hand.
        drivers = [host for host in hosts if any(role == Role.TRAINER for role, _ in host.plan.workers)]
        for group in ([host for host in hosts if host not in drivers], drivers):
            for exports in self._ask(group, "construct", self._rendezvous, self._local, self._roles):
                self._note_exports(exports or {})
        self._ask(hosts, "connect", self._roles)
        self._watch.event("start", text=f"attempt {self._attempt}")

    def _create(self, host: WatchedHost) -> None:
        name = host.plan.name
        host.attempt = self._starts[name] = self._starts.get(name, 0) + 1
        host.report = host.link = None
        host.fault = ""
        spec = self._host_spec(host)
        host.handle = self._backend.create(spec, host.plan, self._job.global_env | host.plan.env, host.attempt)

    def _meet(self, host: WatchedHost, report: Any) -> None:
        host.report = report
        if report.control is not None:
            host.link = ControlLink(host.plan.name, report.control, self._key)

    def _bring_up(self, host: WatchedHost) -> None:
        self._create(host)
        self._meet(host, self._ask([host], "prepare")[0])

    def _note_exports(self, exports: dict[Role, Any]) -> None:
        for role, (entries, implementation) in exports.items():
            self._roles[role].exports, self._roles[role].implementation = entries, implementation

    def _host_spec(self, host: WatchedHost) -> HostSpec:
        together = {role: tuple(Role(r) for r in group) for group in self._job.collocations for role in group}
        workers = []
        for role, rank in host.plan.workers:
            spec = self._job.roles[role]
            identity = Identity(
                self._name, self._run_id, self._began, Role(role), rank, spec.total, attempt=host.attempt
            )
            ranks_meet = spec.kind == "train" and not self._backend.is_local
            workers.append(
                WorkerSpec(
                    identity,
                    spec.entrypoint,
                    rendezvous=ranks_meet,
                    collocated_with=together.get(role, ()),
                    concurrency=spec.concurrency,
                    process_group=spec.process_group if ranks_meet else "",
                )
            )
        return HostSpec(
            name=host.plan.name,
            workers=tuple(workers),
            config=self._backend.pickled(self._job.config),
            key=self._key,
            threads=host.plan.threads,
            python_path=python_path(),
            working_dir=Path.cwd(),
            shared_dir=self._shared_dir,
            log_file=host.log_file,
            hides_devices=not host.plan.accelerator and _DEVICES not in self._job.global_env | host.plan.env,
            reports_calls=self._is_observed,
            recovers=self._recovers,
        )

    # --- driving

    def _drive(self) -> None:
        """Run the trainer to its end; a job without one runs every workload that has a `run()`."""
        workers = [(host, Role(role), rank) for host in self._watch.hosts for role, rank in host.plan.workers]
        driving = [worker for worker in workers if worker[1] == Role.TRAINER]
        if not driving:
            able = self._collect(
                [(h, self._backend.invoke(h.handle, "has_run", role, rank)) for h, role, rank in workers]
            )
            driving = [worker for worker, runs in zip(workers, able, strict=True) if runs]
        self._driving = [host for host, _, _ in driving]
        for host in self._driving:
            host.expendable = False  # nobody could tell its replacement how far it had come
        self._collect([(host, self._backend.invoke(host.handle, "run", role, rank)) for host, role, rank in driving])
        self._ending = True
        self._ask(self._watch.hosts, "teardown")

    def _ask(self, hosts: list[WatchedHost], method: str, *args: Any) -> list[Any]:
        """Call a method of several hosts and return their answers in order; None from who had to be replaced."""
        return self._collect([(host, self._backend.invoke(host.handle, method, *args)) for host in hosts])

    def _collect(self, calls: list[tuple[WatchedHost, Any]]) -> list[Any]:
        """Wait for all, tending every process meanwhile; the first failure or fatal death is raised."""
        values: dict[Any, Any] = {}
        waiting = {reference: (host, host.attempt) for host, reference in calls}
        while waiting:
            for reference in self._backend.transport.wait(list(waiting), _POLL_S):
                outcome = self._backend.transport.outcome(reference)
                host, attempt = waiting.pop(reference)
                values[reference] = outcome.value
                if outcome.error is None:
                    continue
                if isinstance(outcome.error, WorkerDied) and host.expendable and not host.replacing:
                    if host.link is not None and host.attempt == attempt and not self._ending:
                        self._replace(host)
                    continue
                # A death is the cause of what its peers complain about, so it is looked for first.
                self._tend(_BLAME_WITHIN_S)
                raise with_note(outcome.error, f"in {host.plan.name}")
            self._tend()
        self._watch.poll()
        return [values[reference] for _, reference in calls]

    # --- tending

    def _tend(self, within: float = 0.0) -> None:
        """See to everything that happens beside the calls: who died, who hangs, who asked for the end."""
        deadline = time.monotonic() + within
        while True:
            self._watch.poll()
            self._end_hung()
            self._pass_on_stop()
            lost = [host for host in self._watch.hosts if host.is_gone and not host.replacing]
            if lost or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        fatal = [host for host in lost if not host.expendable]
        if fatal:
            self._output = fatal[0].last_lines()
            others = f"; gone too: {', '.join(h.plan.name for h in fatal[1:])}" if fatal[1:] else ""
            raise _AttemptLost(fatal[0].blame() + others)
        for host in lost:
            if host.is_gone and not host.replacing and not self._ending:
                self._replace(host)

    def _end_hung(self) -> None:
        late = [(m, text) for missing, text in self._watch.take("hung") for m in missing]
        hung = [
            (host, text)
            for (role, rank, attempt), text in late
            for host in self._watch.hosts
            if (role, rank) in host.plan.workers and host.attempt == attempt
        ]
        if self._job.stall_timeout:
            hung += self._watch.stalled(self._job.stall_timeout, self._driving)
        for host, why in hung:
            if self._recovers and host.link is not None and host.link.alive and not host.fault:
                stack = self._watch.stack(host)
                innermost = stack.strip().splitlines()[-2].strip() if stack else "a place that it could not tell"
                host.fault = f"{why}; it was at {innermost}"
                self._watch.event("hung", host.plan.name, host.fault)
                if stack:
                    _print_line(f"{host.plan.name} hangs, here:\n{stack.rstrip()}")
                self._end(host)

    def _pass_on_stop(self) -> None:
        if self._stop_asked is None:
            return
        if not self._stop_told:
            self._stop_told = True
            self._watch.event("stop")
            _print_line("stopping at the next safe place, with what is to be kept; Ctrl-C again stops at once")
            for host in self._driving:
                if host.link is not None:
                    host.link.send("stop")
                else:
                    host.handle.request_stop()
        if time.monotonic() - self._stop_asked > self._job.stop_grace:
            raise KeyboardInterrupt

    def _replace(self, host: WatchedHost) -> None:
        """Start a lost process again, replay into it what was called on it, and tell everybody."""
        host.replacing = True
        for role, rank in host.plan.workers:
            self._emit_to_others(host, "lost", role, rank)
        self._again(host, self._stand_in)
        for role, rank in host.plan.workers:
            self._roles[Role(role)].members[rank] = Member(Role(role), rank, host.handle, host.attempt)
            self._emit_to_others(host, "replaced", role, rank, self._backend.pickled(host.handle), host.attempt)
        host.replacing = False
        self._watch.event("replaced", host.plan.name, f"attempt {host.attempt}")

    def _again(self, host: WatchedHost, start: Callable[[WatchedHost], None]) -> None:
        """Start a host, within the budgets of its roles, until it stands."""
        before, host.replacing = host.replacing, True
        while True:
            line = host.blame() if host.link is not None else f"{host.plan.name} died before it was up"
            self._watch.event("lost", host.plan.name, line)
            for role, _ in host.plan.workers:
                limit, used = self._job.roles[role].max_restarts, self._replaced.get(role, 0)
                if used >= limit:
                    self._output = host.last_lines()
                    raise _GaveUp(f"{line}; {role} was replaced {used} times already (max_restarts={limit})")
                self._replaced[role] = used + 1
            _print_line(f"{line}; it is started again")
            self._end(host)
            try:
                start(host)
            except _AttemptLost:
                raise
            except WorkerDied:
                continue
            host.replacing = before
            return

    def _stand_in(self, host: WatchedHost) -> None:
        self._bring_up(host)
        self._note_exports(self._ask([host], "construct", self._rendezvous, self._local, self._roles)[0])
        self._ask([host], "connect", self._roles)
        for role, rank in host.plan.workers:
            asked = self._emit_to_others(host, "replay", role, rank, self._backend.pickled(host.handle), host.attempt)
            self._await_replays(host, {(h.plan.name, role, rank, host.attempt): (h, h.attempt) for h in asked})

    def _emit_to_others(self, host: WatchedHost, kind: str, *details: Any) -> list[WatchedHost]:
        others = [h for h in self._watch.hosts if h is not host and h.link and h.link.alive]
        for other in others:
            assert other.link is not None
            other.link.send(kind, *details)
        return others

    def _await_replays(self, host: WatchedHost, expected: dict[Any, tuple[WatchedHost, int]]) -> None:
        while expected:
            self._tend()
            for asked, error in self._watch.take("replayed", expected):
                del expected[asked]
                if isinstance(error, WorkerDied):
                    raise error
                if error is not None:
                    raise with_note(error, f"while {host.plan.name} was told again what {asked[0]} had told it before")
            if host.is_gone:
                raise WorkerDied(host.blame())
            # Who died meanwhile has nothing to repeat, and neither has its replacement.
            expected = {
                asked: (other, attempt)
                for asked, (other, attempt) in expected.items()
                if other.attempt == attempt and not other.is_gone
            }
            time.sleep(0.02)

    def _explain(self, failure: BaseException) -> tuple[str, str]:
        """One line for the person, and the whole story."""
        notes = getattr(failure, "__notes__", [])
        short = "; ".join(note for note in notes if "\n" not in note)
        line = (str(failure).strip().splitlines() or ["no message"])[0]
        kind = "" if isinstance(failure, WorkerDied) else f"{type(failure).__name__}: "
        return f"{kind}{line}" + (f" ({short})" if short else ""), "".join(traceback.format_exception(failure))

    # --- ending

    def _end(self, host: WatchedHost) -> None:
        kill_local(host)
        if host.handle is not None:
            with contextlib.suppress(Exception):  # a host that is gone already needs no end
                self._backend.kill(host.handle)

    def _end_processes(self) -> None:
        """End all processes, and give back what they were given; the cluster stays."""
        for host in self._watch.hosts:
            with contextlib.suppress(Exception):  # a host that is gone already needs no end
                self._backend.kill(host.handle)
        deadline = time.monotonic() + _GONE_WITHIN_S
        links = [host.link for host in self._watch.hosts if host.link is not None]
        while any(link.alive for link in links) and time.monotonic() < deadline:
            self._watch.poll()
            time.sleep(0.02)
        for host in self._watch.hosts:
            kill_local(host)
        for link in links:
            link.close()
        self._watch.hosts.clear()
        self._watch.messages.clear()
        self._driving, self._ending = [], False
        self._backend.release()
        shutil.rmtree(self._shared_dir, ignore_errors=True)

    def _clean_up(self) -> None:
        self._end_processes()
        self._backend.stop()

    def stop(self) -> None:
        """From another thread: end the run as the first Ctrl-C does."""
        if self._stop_asked is None:
            self._stop_asked = time.monotonic() if self._may_wait() else -math.inf

    def _may_wait(self) -> bool:
        return bool(self._driving) and not self._ending and self._job.stop_grace > 0

    @contextlib.contextmanager
    def _stop_signals(self) -> Iterator[None]:
        """Let SIGTERM end a run as Ctrl-C does, while it lasts; the first of them lets the driver save its work."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(*_: Any) -> None:
            if not self._may_wait() or self._stop_asked is not None:
                raise KeyboardInterrupt
            self._stop_asked = time.monotonic()
            if self._backend.is_local:
                self._pass_on_stop()  # this thread is at work for the trainer, and tends nothing meanwhile

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
