"""Recovery from dead and hung processes: the cells of the table in docs/failures.md, with real processes."""

import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fragile import LATE_S, StopsEarly

from core import JobBuilder, JobEvent, JobResult, WorkerDied, WorkerTimeout
from core.context import current
from tests.messages import says
from tests.processes import left_behind, wait_until_gone

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("ray_cluster")]

GUARD_S = 300.0
"""Timeout in seconds against a hang of a test, far above the duration of each step."""


class Case:
    """One job of a trainer, ranks (ACTOR) and instances (TOOL), with its events and result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Any] = []

    def strike(self, moment: str, worker: str, letters: str = "k") -> "Case":
        """Let a worker die (k), stop (s) or loop (l) at a moment, once for each letter; see `fragile.strike`."""
        (self.folder / f"{moment}-{worker}").write_text(letters)
        return self

    def run(
        self, script: Callable[[Any], Any], tool_restarts: int = 3, ranks: int = 1, tools: int = 2, **limits: Any
    ) -> JobResult:
        """Run a job whose trainer runs the script, and check that nothing of it is left."""
        builder = JobBuilder().device_type("CPU").config({"folder": self.folder, "script": script})
        builder.recovery(**({"max_restarts": 3} | limits))
        builder.role("trainer").run("fragile.Script").resource(cpu=0.25)
        if ranks:
            builder.role("actor").train("fragile.Fragile").total(ranks).resource(cpu=0.25)
        if tools:
            builder.role("tool").run("fragile.Fragile").total(tools).resource(cpu=0.25).max_restarts(tool_restarts)
        self.job = builder.build().submit("fragile", log_dir=self.folder / "logs", observers=[self.on_event])
        assert self.left_behind(1 + ranks + tools) == []
        return self.job

    def on_event(self, event: Any) -> None:
        self.events.append(event)

    @property
    def result(self) -> Any:
        """Return value of the script."""
        return ast.literal_eval((self.folder / "result").read_text())

    @property
    def kinds(self) -> list[str]:
        """Kinds of the job's events, in order."""
        return [event.kind for event in self.events if isinstance(event, JobEvent)]

    def left_behind(self, count: int) -> list[str]:
        """Return the processes, ports, shared memory, actors and placement groups of the run that still exist."""
        run_id = self.job.run_id
        pids: list[int] = []
        for log in (self.folder / "logs").glob("*.log"):
            reports = [text for text in log.read_text().splitlines() if f"in run {run_id}" in text]
            pids += [int(report.split("process ")[1].split()[0]) for report in reports]
        assert len(pids) >= count
        # Linux closes the ports of a dead process. A process whose connection has ended may still run its last steps.
        wait_until_gone(*pids, timeout_s=GUARD_S)
        return left_behind(run_id)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def attempts(trainer: Any) -> Any:
    """Return the attempt numbers of the trainer, the ranks and the tools."""
    stories = [*trainer.RG_ACTOR.story(), *trainer.RG_TOOL.story()]
    return [trainer.attempt, *(attempt for attempt, _ in stories)]


# --- an instance of a `run` role


def test_an_instance_that_dies_during_construction_and_setup_is_started_again(case: Case) -> None:
    result = case.strike("construct", "tool-1").strike("setup", "tool-1").run(attempts)
    assert (result.status, result.attempt, result.error) == ("finished", 1, "")
    assert case.result == [1, 1, 1, 3]


def test_an_instance_that_dies_in_a_call_is_replaced_with_replayed_calls_and_called_again(case: Case) -> None:
    def script(trainer: Any) -> Any:
        group = trainer.RG_TOOL
        handles = [member.handle for member in group]
        for version in (1, 2):
            group.load(f"model {version}")
            group.tune(version)
            group.receive(version)
        group.forget()
        group.load("model 3")
        with pytest.raises(ValueError, match="below zero"):
            group.tune(-1)
        doubled = group.double([1, 2, 3])
        assert [member.handle == before for member, before in zip(group, handles, strict=True)] == [False, True]
        return doubled, group.story()

    # The first time it is killed (k). The second time its method raises a fatal error (m).
    assert case.strike("double", "tool-0", "km").run(script, ranks=0).status == "finished"
    doubled, (first, second) = case.result
    assert doubled == [[2, 4], [6]]
    # The last successful call of each method, in the order of the calls.
    assert first == (3, [("tune", 2), ("receive", 2), ("load", "model 3")])
    assert second[0] == 1
    assert case.kinds == ["start", "lost", "replaced", "lost", "replaced", "end"]
    killed, fatal = [event.text for event in case.events if isinstance(event, JobEvent) and event.kind == "lost"]
    assert re.search(says("TOOL-0", "killed"), killed)
    assert re.search(says("TOOL-0", "MemoryError", "no room for 7 pages", "in double"), fatal)
    assert "and more" in (case.folder / "logs" / "tool-0.log").read_text()


def test_an_idle_instance_that_dies_is_replaced_before_the_next_call(case: Case) -> None:
    def script(trainer: Any) -> Any:
        trainer.RG_TOOL.load("model")
        second = trainer.RG_TOOL[1]
        os.kill(trainer.RG_TOOL.pid()[1], signal.SIGKILL)
        # Once the death is known, a call that is not idempotent waits for the replacement.
        while current().directory.replacement(second, 0.0) == second:
            time.sleep(0.01)
        return trainer.RG_TOOL.once([5, 6]), trainer.RG_TOOL.story()[1]

    assert case.run(script, ranks=0).status == "finished"
    assert case.result == ([[5], [6]], (2, [("load", "model")]))


def test_a_call_with_replay_during_which_the_instance_dies_runs_once_in_the_replacement(case: Case) -> None:
    def script(trainer: Any) -> Any:
        trainer.RG_TOOL.load("model")
        trainer.RG_TOOL.receive(1)
        return trainer.RG_TOOL.story()[0]

    assert case.strike("receive", "tool-0").run(script, ranks=0, tools=1).status == "finished"
    attempt, seen = case.result
    assert (attempt, seen) == (2, [("load", "model"), ("receive", 1)])


def test_an_instance_that_dies_during_a_checkpoint_is_replaced_and_the_checkpoint_is_written(case: Case) -> None:
    def script(trainer: Any) -> Any:
        trainer.RG_TOOL.load("model")
        saving = trainer.RG_ACTOR.save(1)
        os.kill(trainer.RG_TOOL.pid()[0], signal.SIGKILL)
        return saving.result(), trainer.RG_TOOL.double([1, 2]), trainer.RG_TOOL.story()[0]

    assert case.run(script, tools=1).status == "finished"
    assert case.result == ([1], [[2, 4]], (2, [("load", "model")]))
    assert len(list(case.folder.glob("saved-*"))) == 1


def test_a_call_that_is_not_idempotent_is_not_sent_again_and_its_error_in_the_trainer_restarts_the_job(
    case: Case,
) -> None:
    def script(trainer: Any) -> Any:
        caught = 0
        if trainer.attempt == 1:
            with pytest.raises(WorkerDied):
                trainer.RG_TOOL.once([1, 2])
            caught = 1
        return caught, trainer.RG_TOOL.once([3, 4]), attempts(trainer)

    result = case.strike("once", "tool-0", "kk").run(script)
    assert (result.status, result.attempt) == ("finished", 2)
    caught, results, (trainer, rank, *tools) = case.result
    assert (caught, results, trainer, rank) == (0, [[3], [4]], 2, 2)
    # TOOL-0 was replaced once or, before the trainer's end was detected, twice. Then the job restarted.
    assert tools in ([3, 2], [4, 2])


def test_several_instances_that_die_in_one_call_are_replaced(case: Case) -> None:
    result = (
        case.strike("double", "tool-0").strike("double", "tool-1").run(lambda t: t.RG_TOOL.double([1, 2, 3]), ranks=0)
    )
    assert (result.status, case.result) == ("finished", [[2, 4], [6]])


def test_instances_lost_together_are_replaced_concurrently_and_count_once(case: Case) -> None:
    def script(trainer: Any) -> Any:
        for pid in trainer.RG_TOOL.pid():
            os.kill(pid, signal.SIGKILL)
        return trainer.RG_TOOL.double([*range(6)]), [attempt for attempt, _ in trainer.RG_TOOL.story()]

    result = case.run(script, ranks=0, tools=6, tool_restarts=1)
    assert (result.status, result.attempt) == ("finished", 1)
    assert case.result == ([[0], [2], [4], [6], [8], [10]], [2] * 6)
    # No replacement waits for another one.
    assert case.kinds == ["start", *["lost"] * 6, *["replaced"] * 6, "end"]


def test_a_role_above_its_max_restarts_restarts_the_job_and_a_job_above_its_own_fails(case: Case) -> None:
    result = case.strike("double", "tool-0", "kkkkk").run(
        lambda t: t.RG_TOOL.double([1, 2]), ranks=0, tools=1, tool_restarts=1, max_restarts=1
    )
    assert (result.status, result.exit_code, result.attempt) == ("failed", 1, 2)
    assert re.search(says("TOOL-0", "max_restarts=1", "2 attempts"), result.error)
    assert case.kinds == ["start", "lost", "replaced", "lost", "restart", "start", "lost", "replaced", "lost", "end"]


# --- a rank of a `train` role, and the trainer


def test_the_death_of_a_rank_or_of_the_trainer_restarts_the_job_at_any_moment(case: Case) -> None:
    def script(trainer: Any) -> Any:
        trainer.RG_ACTOR.double([1, 2])
        trainer.RG_ACTOR.save(1).result()
        return attempts(trainer)

    moments = [("setup", "actor-1"), ("init", "trainer-0"), ("double", "actor-0"), ("save", "actor-1")]
    moments.append(("end", "trainer-0"))
    for moment, worker in moments:
        case.strike(moment, worker)
    result = case.run(script, ranks=2, tools=1, max_restarts=5)
    assert (result.status, result.attempt, result.exit_code) == ("finished", 6, 0)
    assert case.result == [6, 6, 6, 6]
    # The first rank died before all processes had started, so there is no "start" before the first "restart".
    assert case.kinds == ["restart", *["start", "restart"] * 4, "start", "end"]
    restarts = [event.text for event in case.events if isinstance(event, JobEvent) and event.kind == "restart"]
    for text, (_, worker) in zip(restarts, moments, strict=True):
        assert worker.upper() in text


def test_the_death_of_an_idle_rank_or_of_a_waiting_trainer_restarts_the_job_at_once(case: Case) -> None:
    def script(trainer: Any) -> Any:
        if trainer.attempt < 3:
            pid = trainer.RG_ACTOR.pid()[0]
            if trainer.attempt == 2:
                pid = os.getpid()
            threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
            threading.Event().wait()  # only the death of the process ends this wait
        return attempts(trainer)

    assert case.run(script, tools=1).attempt == 3
    assert case.result == [3, 3, 3]


def test_a_job_above_its_max_restarts_fails_with_the_number_of_attempts(case: Case) -> None:
    result = case.strike("double", "actor-0", "kkk").run(lambda t: t.RG_ACTOR.double([1, 2]), tools=0, max_restarts=1)
    assert (result.status, result.exit_code, result.attempt) == ("failed", 1, 2)
    assert re.search(says("ACTOR-0", "2 attempts", "max_restarts=1"), result.error)
    assert f"in run {result.run_id}" in result.output  # the last lines of the dead process's log


def test_an_exception_fails_the_job_without_a_restart(case: Case) -> None:
    def script(trainer: Any) -> None:
        trainer.RG_TOOL.tune(-1)

    result = case.run(script, ranks=0, tools=1)
    assert (result.status, result.attempt) == ("failed", 1)
    assert result.error.startswith("ValueError: below zero")


# --- hung processes


def test_a_worker_that_exceeds_its_timeout_is_reported_with_its_stack_and_replaced(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(trainer: Any) -> Any:
        results = trainer.RG_TOOL.quick()  # idempotent, so it is sent again
        with pytest.raises(WorkerTimeout, match=says("TOOL.quick_once", "rank 0")):
            trainer.RG_TOOL.quick_once()
        # The worker counts as lost immediately, so the next call waits for its replacement.
        return results, trainer.RG_TOOL.quick_once(), attempts(trainer)

    assert case.strike("quick", "tool-1", "l").strike("quick_once", "tool-0", "l").run(script).status == "finished"
    assert case.result == ([0, 1], [0, 1], [1, 1, 2, 2])
    (process, text), _ = hung(case)
    assert process == "TOOL-1"
    assert re.search(says(f"{LATE_S:g} s", "TOOL.quick", "rank 1", "fragile.py", "strike"), text)
    # The terminal shows the complete stack.
    assert re.search(says("TOOL-1", 'fragile.py", line', "in quick", "in strike"), capsys.readouterr().out)


def hung(case: Case) -> list[tuple[str, str]]:
    """Return (process, reason) of each process that counted as hung."""
    return [
        (event.process, event.text) for event in case.events if isinstance(event, JobEvent) and event.kind == "hung"
    ]


def test_a_process_without_progress_for_the_stall_timeout_is_killed_and_one_with_progress_is_not(case: Case) -> None:
    def script(trainer: Any) -> Any:
        return trainer.RG_ACTOR.double([1, 2]), trainer.RG_TOOL.double([1, 2]), attempts(trainer)

    # A rank that loops (l) and the second time is busy for long (b), and an instance that is stopped (s).
    case.strike("double", "actor-0", "lb").strike("double", "tool-0", "s")
    result = case.run(script, tools=1, stall_timeout=LATE_S)
    assert (result.status, result.attempt) == ("finished", 2)
    assert case.result == ([[2, 4]], [[2, 4]], [2, 2, 3])
    (rank, rank_reason), (instance, instance_reason) = hung(case)
    assert (rank, instance) == ("ACTOR-0", "TOOL-0")
    assert "ACTOR.double" in rank_reason
    assert re.search(r"\d s", instance_reason)  # a stopped process can report nothing else


@pytest.mark.nightly
def test_a_stopped_rank_and_a_trainer_without_calls_count_as_hung(case: Case) -> None:
    def script(trainer: Any) -> Any:
        if trainer.attempt == 2:
            threading.Event().wait()
        return trainer.RG_ACTOR.double([1, 2]), attempts(trainer)

    result = case.strike("double", "actor-0", "s").run(script, tools=1, stall_timeout=LATE_S)
    assert (result.status, result.attempt) == ("finished", 3)
    assert case.result == ([[2, 4]], [3, 3, 3])
    (rank, _), (trainer, why) = hung(case)
    assert (rank, trainer) == ("ACTOR-0", "TRAINER-0")
    assert "TRAINER.run" in why


@pytest.mark.nightly
def test_an_instance_that_is_stopped_during_its_start_counts_as_hung(case: Case) -> None:
    early = StopsEarly(case.folder)
    result = case.run(
        lambda trainer: early and attempts(trainer), tools=1, stall_timeout=LATE_S, placement_timeout=LATE_S
    )
    assert (result.status, result.attempt, case.result) == ("finished", 1, [1, 1, 2])
    assert [name for name, _ in hung(case)] == ["TOOL-0"]


# --- the driver, and the user

DRIVER = """
import sys, time
from pathlib import Path
import ray
sys.path.insert(0, sys.argv[3])
from core import JobBuilder

def script(trainer):
    trainer.RG_ACTOR.double([1, 2])
    (trainer.config["folder"] / "running").write_text("")
    while not (trainer.stop_requested and trainer.config["polite"]):
        time.sleep(0.05)
    trainer.RG_ACTOR.save(7).result()

folder = Path(sys.argv[1])
config = {"folder": folder, "script": script, "polite": sys.argv[2] == "polite"}
builder = JobBuilder().device_type("CPU").config(config)
builder.recovery(stop_grace=0 if sys.argv[2] == "no grace" else 3600)
builder.role("trainer").run("fragile.Script").resource(cpu=0.25)
builder.role("actor").train("fragile.Fragile").resource(cpu=0.25)
sys.exit(builder.build().submit("driven", log_dir=folder / "logs").exit_code)
"""


@pytest.fixture
def driven(ray_address: str, tmp_path: Path, request: pytest.FixtureRequest) -> "Iterator[subprocess.Popen[str]]":
    """Start a driver in a separate process, whose trainer waits for a stop request."""
    command = [sys.executable, "-c", DRIVER, str(tmp_path), request.param, str(Path(__file__).parent)]
    env = os.environ | {"RAY_ADDRESS": ray_address}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "running").exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield process
        process.kill()


def processes(folder: Path) -> list[int]:
    """Return the process ids in the logs."""
    logs = [log.read_text() for log in (folder / "logs").glob("*.log")]
    return [int(text.split("process ")[1].split()[0]) for text in logs]


@pytest.mark.parametrize("driven", ["polite"], indirect=True)
def test_killing_the_driver_ends_all_processes(driven: "subprocess.Popen[str]", tmp_path: Path) -> None:
    pids = processes(tmp_path)
    assert len(pids) == 2
    driven.kill()
    driven.wait(GUARD_S)
    wait_until_gone(*pids, timeout_s=GUARD_S)


@pytest.mark.parametrize("driven", ["polite"], indirect=True)
def test_the_first_sigterm_lets_the_trainer_save_its_state(driven: "subprocess.Popen[str]", tmp_path: Path) -> None:
    driven.send_signal(signal.SIGTERM)
    out, _ = driven.communicate(timeout=GUARD_S)
    assert driven.returncode == 130
    assert "Ctrl-C" in out
    assert len(list(tmp_path.glob("saved-*-7"))) == 1
    wait_until_gone(*processes(tmp_path), timeout_s=GUARD_S)


@pytest.mark.parametrize(("driven", "times"), [("rude", 2), ("no grace", 1)], indirect=["driven"])
def test_the_second_ctrl_c_stops_at_once_and_so_does_the_first_without_stop_grace(
    driven: "subprocess.Popen[str]", tmp_path: Path, times: int
) -> None:
    assert driven.stdout is not None
    driven.send_signal(signal.SIGINT)
    if times == 2:
        # The output shows that the first one was handled. The grace period is an hour.
        while "Ctrl-C" not in driven.stdout.readline():
            assert driven.poll() is None
        driven.send_signal(signal.SIGINT)
    driven.communicate(timeout=GUARD_S)
    assert driven.returncode == 130
    assert list(tmp_path.glob("saved-*")) == []
    wait_until_gone(*processes(tmp_path), timeout_s=GUARD_S)


# --- Ray itself

OWN_CLUSTER = """
import os, signal, sys, time
from pathlib import Path
from core import JobBuilder
sys.path.insert(0, sys.argv[3])

def script(trainer):
    folder = trainer.config["folder"]
    if trainer.attempt == 1:
        (folder / "running").write_text("")
        while not trainer.stop_requested:
            time.sleep(0.05)
    return trainer.RG_TOOL.double([1, 2]), trainer.attempt

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    builder = JobBuilder().device_type("CPU").config({"folder": folder, "script": script})
    builder.recovery(max_restarts=1, stop_grace=5)
    builder.role("trainer").run("fragile.Script").resource(cpu=0.25)
    builder.role("tool").run("fragile.Fragile").total(2).resource(cpu=0.25)
    sys.exit(builder.build().submit("own", log_dir=folder / "logs").exit_code)
"""


@pytest.fixture
def on_its_own_cluster(tmp_path: Path, request: pytest.FixtureRequest) -> "Iterator[subprocess.Popen[str]]":
    """Start a driver that starts its own Ray cluster, and wait until its trainer is running."""
    (tmp_path / "driver.py").write_text(OWN_CLUSTER)
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path), "", str(Path(__file__).parent)]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    env["TMPDIR"] = str(tmp_path)  # too long for the paths of Ray's sockets
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        for name in getattr(request, "param", ()):
            end_while_it_starts(process.pid, name)
        while not (tmp_path / "running").exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield process
        process.kill()


def end_while_it_starts(driver: int, name: str) -> None:
    """Kill a process of Ray as soon as it exists."""
    deadline = time.monotonic() + GUARD_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError, OSError):
            os.kill(of_ray(driver, name), signal.SIGKILL)
            return


def of_ray(driver: int, name: str) -> int:
    """Return the pid of the driver's child process with this name."""
    children = Path(f"/proc/{driver}/task").glob("*/children")
    pids = [pid for file in children for pid in file.read_text().split()]
    (match,) = [int(pid) for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == name]
    return match


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("raylet", signal.SIGKILL),
        ("gcs_server", signal.SIGSTOP),
        pytest.param("raylet", signal.SIGSTOP, marks=pytest.mark.nightly),
        pytest.param("gcs_server", signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_a_dead_or_stopped_process_of_the_own_cluster_is_named_and_the_job_restarts_on_a_new_cluster(
    on_its_own_cluster: "subprocess.Popen[str]", tmp_path: Path, name: str, way: signal.Signals
) -> None:
    os.kill(of_ray(on_its_own_cluster.pid, name), way)
    out, _ = on_its_own_cluster.communicate(timeout=GUARD_S)
    assert on_its_own_cluster.returncode == 0, out
    assert re.search(says(name, "attempt 2"), out)
    assert ast.literal_eval((tmp_path / "result").read_text()) == ([[2], [4]], 2)


@pytest.mark.nightly
@pytest.mark.parametrize("on_its_own_cluster", [["raylet"]], indirect=True)
def test_a_ray_cluster_that_does_not_start_is_started_again(on_its_own_cluster: "subprocess.Popen[str]") -> None:
    on_its_own_cluster.send_signal(signal.SIGINT)
    out, _ = on_its_own_cluster.communicate(timeout=GUARD_S)
    assert on_its_own_cluster.returncode == 130, out
    assert re.search(says("Ray did not start", "attempt 2"), out)


def test_a_signal_to_the_process_group_ends_the_run(
    on_its_own_cluster: "subprocess.Popen[str]",
) -> None:
    os.killpg(on_its_own_cluster.pid, signal.SIGTERM)
    out, _ = on_its_own_cluster.communicate(timeout=GUARD_S)
    assert on_its_own_cluster.returncode == 130, out
