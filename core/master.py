"""The master runs inside the driver: it starts a job's processes, watches them, and leaves nothing behind."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.backends.ray import RayBackend, python_path
from core.context import Directory, Identity, Member, RoleEntry, WorkloadContext, entered
from core.control import ControlLink, memory_bytes
from core.errors import WorkerDied, with_note
from core.host import HostReport, HostSpec, WorkerSpec
from core.plan import HostPlan, JobResult
from core.roles import Role

if TYPE_CHECKING:
    from core.job import Job

_POLL_S = 0.2
_STATUS_EVERY_S = 2.0
_BLAME_WITHIN_S = 1.0
_GONE_WITHIN_S = 10.0


@dataclass
class _Host:
    plan: HostPlan
    handle: Any
    log_file: Path | None
    report: HostReport | None = None
    link: ControlLink | None = None


class Master:
    """One run of one job."""

    def __init__(
        self,
        job: "Job",
        name: str,
        log_dir: Path | None = None,
        address: str | None = None,
        began: float | None = None,
    ) -> None:
        self._job = job
        self._name = name
        self._began = time.time() if began is None else began
        self._log_dir = log_dir
        self._run_id = secrets.token_hex(4)
        self._key = secrets.token_bytes(32)
        self._backend = RayBackend(self._run_id, address)
        self._hosts: list[_Host] = []
        self._shared_dir = Path("/dev/shm") / f"troupe-{self._run_id}"
        self._peak_memory = 0
        self._next_status = 0.0
        self._roles: Directory = {}

    def run(self) -> JobResult:
        """Start, drive, clean up."""
        began = time.monotonic()
        status, error, trace = "finished", "", ""
        try:
            with _stop_signals():
                try:
                    self._start()
                    self._drive()
                except KeyboardInterrupt:
                    status, error = "stopped", "stopped by the user"
                except Exception as failure:  # noqa: BLE001 - whatever fails is told in the result
                    status, (error, trace) = "failed", self._explain(failure)
        finally:
            self._clean_up()
        return JobResult(
            run_id=self._run_id,
            status=status,
            error=error,
            traceback=trace,
            elapsed=time.monotonic() - began,
            peak_memory_bytes=self._peak_memory,
        )

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
        _claim(self._shared_dir)
        self._backend.start(self._job.placement)
        for plan in self._job.placement.hosts:
            log_file = self._log_dir / f"{plan.name.lower()}.log" if self._log_dir else None
            env = self._job.global_env | plan.env
            handle = self._backend.create(self._host_spec(plan, log_file), plan, env)
            self._hosts.append(_Host(plan, handle, log_file))
        for host, report in zip(self._hosts, self._ask(self._hosts, "prepare"), strict=True):
            host.report = report
            host.link = ControlLink(host.plan.name, report.control, self._key)
        rendezvous = {
            role: (host.report.ip, port)
            for host in self._hosts
            if host.report
            for role, port in host.report.ports.items()
        }
        directory = self._roles = self._directory()
        drivers = [host for host in self._hosts if self._drives(host)]
        # The driver comes last: it is made with the others' exports in hand.
        for group in ([host for host in self._hosts if host not in drivers], drivers):
            for exports in self._ask(group, "construct", rendezvous, self._local_ranks(), directory):
                for role, (entries, implementation) in exports.items():
                    directory[role].exports, directory[role].implementation = entries, implementation
        self._ask(self._hosts, "connect", directory)

    def _host_spec(self, plan: HostPlan, log_file: Path | None) -> HostSpec:
        together = {role: tuple(Role(r) for r in group) for group in self._job.collocations for role in group}
        workers = tuple(
            WorkerSpec(
                identity=Identity(self._name, self._run_id, self._began, Role(role), rank, self._job.roles[role].total),
                entrypoint=self._job.roles[role].entrypoint,
                rendezvous=self._job.roles[role].kind == "train",
                collocated_with=together.get(role, ()),
            )
            for role, rank in plan.workers
        )
        return HostSpec(
            name=plan.name,
            workers=workers,
            config=self._backend.pickled(self._job.config),
            key=self._key,
            threads=max(1, int(plan.cpu)),
            python_path=python_path(),
            working_dir=Path.cwd(),
            shared_dir=self._shared_dir,
            log_file=log_file,
            observers=tuple(self._job.observers),
        )

    def _directory(self) -> Directory:
        directory: Directory = {}
        for role, spec in self._job.roles.items():
            members = {rank: host.handle for host in self._hosts for name, rank in host.plan.workers if name == role}
            directory[Role(role)] = RoleEntry(
                role=Role(role),
                kind=spec.kind,
                members=[Member(Role(role), rank, members[rank]) for rank in range(spec.total)],
                resource=spec.resource.model_dump(),
            )
        return directory

    def _local_ranks(self) -> dict[tuple[Role, int], tuple[int, int]]:
        """(local rank, local world size) of each worker, from the nodes on which the hosts really are."""
        by_node: dict[tuple[str, str], list[int]] = {}
        for host in self._hosts:
            assert host.report is not None
            for role, rank in host.plan.workers:
                by_node.setdefault((role, host.report.ip), []).append(rank)
        return {
            (Role(role), rank): (position, len(ranks))
            for (role, _), ranks in by_node.items()
            for position, rank in enumerate(sorted(ranks))
        }

    # --- driving

    def _drives(self, host: _Host) -> bool:
        return any(role == Role.TRAINER for role, _ in host.plan.workers)

    def _drive(self) -> None:
        """Run the trainer to its end; a job without one runs every workload that has a `run()`."""
        driving = [(h, Role(role), rank) for h in self._hosts if self._drives(h) for role, rank in h.plan.workers]
        driving = [(host, role, rank) for host, role, rank in driving if role == Role.TRAINER]
        if not driving:
            everybody = [(host, Role(role), rank) for host in self._hosts for role, rank in host.plan.workers]
            able = self._collect(
                [(h, self._backend.invoke(h.handle, "has_run", role, rank)) for h, role, rank in everybody]
            )
            driving = [worker for worker, runs in zip(everybody, able, strict=True) if runs]
        self._collect([(host, self._backend.invoke(host.handle, "run", role, rank)) for host, role, rank in driving])
        self._ask(self._hosts, "teardown")

    def _ask(self, hosts: list[_Host], method: str, *args: Any) -> list[Any]:
        """Call a method of several hosts and return their answers in order."""
        return self._collect([(host, self._backend.invoke(host.handle, method, *args)) for host in hosts])

    def _collect(self, calls: list[tuple[_Host, Any]]) -> list[Any]:
        """Wait for all, watching every process meanwhile; the first failure or death is raised."""
        values: dict[Any, Any] = {}
        waiting = {reference: host for host, reference in calls}
        while waiting:
            for reference in self._backend.transport.wait(list(waiting), _POLL_S):
                outcome = self._backend.transport.outcome(reference)
                host = waiting.pop(reference)
                if outcome.error is not None:
                    self._raise_if_dead(_BLAME_WITHIN_S)
                    raise with_note(outcome.error, f"in {host.plan.name}")
                values[reference] = outcome.value
            self._raise_if_dead(0.0)
        self._watch()
        return [values[reference] for _, reference in calls]

    def _watch(self) -> list[_Host]:
        """Show what the processes said, keep their status fresh, and return those that are gone."""
        links = [host.link for host in self._hosts if host.link is not None]
        for link in links:
            for line in link.poll():
                _print_line(line)
        if time.monotonic() >= self._next_status:
            self._next_status = time.monotonic() + _STATUS_EVERY_S
            # The driver's children are Ray's own processes, which are not counted.
            total = memory_bytes(descendants=False) + sum(link.status.memory_bytes for link in links if link.alive)
            self._peak_memory = max(self._peak_memory, total)
            for link in links:
                if link.alive:
                    link.ask_status()
        return [host for host in self._hosts if host.link is not None and not host.link.alive]

    def _raise_if_dead(self, within: float) -> None:
        """A death is the cause of what its peers complain about, so it is looked for first."""
        deadline = time.monotonic() + within
        while not (dead := self._watch()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if dead:
            host = dead[0]
            assert host.link is not None and host.report is not None
            doing, since = host.link.status.doing, time.time() - host.link.status.since
            told = f"last seen {doing} for {since:.0f} s"
            others = f"; gone too: {', '.join(h.plan.name for h in dead[1:])}" if dead[1:] else ""
            where = f"; its output: {host.log_file}" if host.log_file else ""
            raise WorkerDied(
                f"{host.plan.name} (process {host.report.pid} on {host.report.ip}) died: killed, out of memory, or "
                f"crashed; {told}{others}{where}"
            )

    def _explain(self, failure: Exception) -> tuple[str, str]:
        """One line for the person, and the whole story."""
        notes = getattr(failure, "__notes__", [])
        short = "; ".join(note for note in notes if "\n" not in note)
        text = str(failure).strip().splitlines()
        line = text[0] if text else "no message"
        kind = "" if isinstance(failure, WorkerDied) and not short else f"{type(failure).__name__}: "
        return f"{kind}{line}" + (f" ({short})" if short else ""), "".join(traceback.format_exception(failure))

    # --- ending

    def _clean_up(self) -> None:
        for host in self._hosts:
            with contextlib.suppress(Exception):  # a host that is gone already needs no end
                self._backend.kill(host.handle)
        deadline = time.monotonic() + _GONE_WITHIN_S
        links = [host.link for host in self._hosts if host.link is not None]
        while any(link.alive for link in links) and time.monotonic() < deadline:
            self._watch()
            time.sleep(0.02)
        for link in links:
            link.close()
        self._backend.stop()
        shutil.rmtree(self._shared_dir, ignore_errors=True)


def _print_line(text: str) -> None:
    print(text, flush=True)


def _claim(folder: Path) -> None:
    folder.mkdir(parents=True)
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}
    (folder / "owner.json").write_text(json.dumps(owner), encoding="utf-8")


def sweep_shared(root: Path = Path("/dev/shm")) -> list[Path]:
    """Remove the shared folders of runs on this machine whose driver was killed; returns what was removed."""
    removed = []
    for folder in root.glob("troupe-*"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            owner = json.loads((folder / "owner.json").read_text(encoding="utf-8"))
            if owner["host"] == socket.gethostname() and _started(owner["pid"]) != owner["started"]:
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _started(pid: int) -> str:
    """When a process began, in clock ticks since boot; empty when there is none. Tells a reused pid apart."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """Let SIGTERM end a run as Ctrl-C does, while it lasts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
