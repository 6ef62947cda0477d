"""Who dies or hangs, when, and what then: the table of docs/failures.md, cell by cell, with real processes."""

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
"""Against a hang: far more than anything here takes."""


class Case:
    """One job of a trainer, ranks (ACTOR) and instances (TOOL), and what became of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Any] = []

    def strike(self, moment: str, worker: str, how: str = "k") -> "Case":
        """Let a worker die (k), stop (s) or loop (l) at a moment, once for each letter."""
        (self.folder / f"{moment}-{worker}").write_text(how)
        return self

    def run(
        self, script: Callable[[Any], Any], tool_restarts: int = 3, ranks: int = 1, tools: int = 2, **limits: Any
    ) -> JobResult:
        """Run the script in the trainer."""
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
        """What the script returned."""
        return ast.literal_eval((self.folder / "result").read_text())

    @property
    def kinds(self) -> list[str]:
        """What happened to the job."""
        return [event.kind for event in self.events if isinstance(event, JobEvent)]

    def left_behind(self, count: int) -> list[str]:
        """Processes, ports, shared memory, actors and placement groups of the run that are still there."""
        run_id = self.job.run_id
        pids = [
            line.split("process ")[1].split()[0]
            for log in (self.folder / "logs").glob("*.log")
            for line in log.read_text().splitlines()
            if f"in run {run_id}" in line
        ]
        assert len(pids) >= count
        # A process that is gone holds no port and has no children: Linux ends both with it. One whose connection has
        # ended may be on its last few steps still.
        wait_until_gone(*map(int, pids), timeout_s=GUARD_S)
        return left_behind(run_id)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def attempts(trainer: Any) -> Any:
    """Which start of the trainer, of the ranks and of the tools this is."""
    stories = [*trainer.RG_ACTOR.story(), *trainer.RG_TOOL.story()]
    return [trainer.attempt, *(attempt for attempt, _ in stories)]


# --- an instance of a `run` role


def test_an_instance_that_dies_while_it_is_set_up_is_started_again(case: Case) -> None:
    result = case.strike("construct", "tool-1").strike("setup", "tool-1").run(attempts)
    assert (result.status, result.attempt, result.error) == ("finished", 1, "")
    assert case.result == [1, 1, 1, 3]


def test_an_instance_that_dies_in_a_call_is_replaced_told_again_and_asked_again_as_often_as_it_takes(
    case: Case,
) -> None:
    def script(trainer: Any) -> Any:
        group, handles = trainer.RG_TOOL, [member.handle for member in trainer.RG_TOOL]
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

    # The second time nothing kills it: what its method raises is fatal.
    assert case.strike("double", "tool-0", "km").run(script, ranks=0).status == "finished"
    doubled, (first, second) = case.result
    assert doubled == [[2, 4], [6]]
    # The last call of each that succeeded, in the order of the last calls.
    assert first == (3, [("tune", 2), ("receive", 2), ("load", "model 3")])
    assert second[0] == 1
    assert case.kinds == ["start", "lost", "replaced", "lost", "replaced", "end"]
    killed, of_an_error = [event.text for event in case.events if isinstance(event, JobEvent) and event.kind == "lost"]
    assert re.search(says("TOOL-0", "killed"), killed)
    assert re.search(says("TOOL-0", "MemoryError", "no room for 7 pages", "in double"), of_an_error)
    assert "and more" in (case.folder / "logs" / "tool-0.log").read_text()


def test_an_instance_that_dies_idle_is_replaced_before_it_gets_work(case: Case) -> None:
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


def test_an_instance_that_dies_in_the_call_that_is_to_be_replayed_gets_that_call_once(case: Case) -> None:
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


def test_a_call_that_is_not_idempotent_is_never_sent_twice_and_if_the_trainer_dies_of_it_all_starts_again(
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
    caught, answers, (trainer, rank, *tools) = case.result
    assert (caught, answers, trainer, rank) == (0, [[3], [4]], 2, 2)
    # TOOL-0 was replaced once, perhaps a second time before the trainer's end was noticed, and started again with all.
    assert tools in ([3, 2], [4, 2])


def test_several_instances_may_die_at_once(case: Case) -> None:
    result = (
        case.strike("double", "tool-0").strike("double", "tool-1").run(lambda t: t.RG_TOOL.double([1, 2, 3]), ranks=0)
    )
    assert (result.status, case.result) == ("finished", [[2, 4], [6]])


def test_those_that_are_lost_at_once_come_back_at_once_and_count_once(case: Case) -> None:
    def script(trainer: Any) -> Any:
        for pid in trainer.RG_TOOL.pid():
            os.kill(pid, signal.SIGKILL)
        return trainer.RG_TOOL.double([*range(6)]), [attempt for attempt, _ in trainer.RG_TOOL.story()]

    result = case.run(script, ranks=0, tools=6, tool_restarts=1)
    assert (result.status, result.attempt) == ("finished", 1)
    assert case.result == ([[0], [2], [4], [6], [8], [10]], [2] * 6)
    # Nobody waits for another's replacement.
    assert case.kinds == ["start", *["lost"] * 6, *["replaced"] * 6, "end"]


def test_beyond_the_budget_of_its_role_all_starts_again_and_beyond_the_jobs_the_run_fails(case: Case) -> None:
    result = case.strike("double", "tool-0", "kkkkk").run(
        lambda t: t.RG_TOOL.double([1, 2]), ranks=0, tools=1, tool_restarts=1, max_restarts=1
    )
    assert (result.status, result.exit_code, result.attempt) == ("failed", 1, 2)
    assert re.search(says("TOOL-0", "max_restarts=1", "2 attempts"), result.error)
    assert case.kinds == ["start", "lost", "replaced", "lost", "restart", "start", "lost", "replaced", "lost", "end"]


# --- a rank of a `train` role, and the trainer


def test_whenever_a_rank_or_the_trainer_dies_all_starts_again(case: Case) -> None:
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
    assert case.kinds == ["restart", *["start", "restart"] * 4, "start", "end"]  # the first died before all stood
    restarts = [event.text for event in case.events if isinstance(event, JobEvent) and event.kind == "restart"]
    for text, (_, worker) in zip(restarts, moments, strict=True):
        assert worker.upper() in text


def test_the_death_of_an_idle_rank_or_of_a_waiting_trainer_starts_all_again_at_once(case: Case) -> None:
    def script(trainer: Any) -> Any:
        if trainer.attempt < 3:
            pid = os.getpid() if trainer.attempt == 2 else trainer.RG_ACTOR.pid()[0]
            threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
            threading.Event().wait()  # nothing but the death ends it
        return attempts(trainer)

    assert case.run(script, tools=1).attempt == 3
    assert case.result == [3, 3, 3]


def test_beyond_its_budget_the_job_fails_and_says_so(case: Case) -> None:
    result = case.strike("double", "actor-0", "kkk").run(lambda t: t.RG_ACTOR.double([1, 2]), tools=0, max_restarts=1)
    assert (result.status, result.exit_code, result.attempt) == ("failed", 1, 2)
    assert re.search(says("ACTOR-0", "2 attempts", "max_restarts=1"), result.error)
    assert f"in run {result.run_id}" in result.output  # the last lines of who died


def test_an_exception_is_no_death_and_starts_nothing_again(case: Case) -> None:
    def script(trainer: Any) -> None:
        trainer.RG_TOOL.tune(-1)

    result = case.run(script, ranks=0, tools=1)
    assert (result.status, result.attempt) == ("failed", 1)
    assert result.error.startswith("ValueError: below zero")


# --- who hangs


def test_who_does_not_answer_in_time_is_named_with_its_place_and_replaced(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(trainer: Any) -> Any:
        answers = trainer.RG_TOOL.quick()  # idempotent: it is sent again
        with pytest.raises(WorkerTimeout, match=says("TOOL.quick_once", "rank 0")):
            trainer.RG_TOOL.quick_once()
        # It counts as lost at once, so the next call waits for its replacement.
        return answers, trainer.RG_TOOL.quick_once(), attempts(trainer)

    assert case.strike("quick", "tool-1", "l").strike("quick_once", "tool-0", "l").run(script).status == "finished"
    assert case.result == ([0, 1], [0, 1], [1, 1, 2, 2])
    (process, text), _ = hung(case)
    assert process == "TOOL-1"
    assert re.search(says(f"{LATE_S:g} s", "TOOL.quick", "rank 1", "fragile.py", "strike"), text)
    # The whole stack.
    assert re.search(says("TOOL-1", 'fragile.py", line', "in quick", "in strike"), capsys.readouterr().out)


def hung(case: Case) -> list[tuple[str, str]]:
    """Who was taken for dead, and why."""
    return [
        (event.process, event.text) for event in case.events if isinstance(event, JobEvent) and event.kind == "hung"
    ]


def test_who_shows_no_progress_for_the_stall_timeout_is_taken_for_dead_and_who_does_may_take_longer(
    case: Case,
) -> None:
    def script(trainer: Any) -> Any:
        return trainer.RG_ACTOR.double([1, 2]), trainer.RG_TOOL.double([1, 2]), attempts(trainer)

    # A rank in an endless loop, which the second time works for long, and a stopped instance.
    case.strike("double", "actor-0", "lb").strike("double", "tool-0", "s")
    result = case.run(script, tools=1, stall_timeout=LATE_S)
    assert (result.status, result.attempt) == ("finished", 2)
    assert case.result == ([[2, 4]], [[2, 4]], [2, 2, 3])
    (rank, in_a_call), (instance, silent) = hung(case)
    assert (rank, instance) == ("ACTOR-0", "TOOL-0")
    assert "ACTOR.double" in in_a_call
    assert re.search(r"\d s", silent)  # nothing more is known of it


@pytest.mark.nightly
def test_a_stopped_rank_and_a_trainer_that_calls_nobody_are_taken_for_dead_too(case: Case) -> None:
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
def test_an_instance_that_is_stopped_before_it_is_up_is_taken_for_dead_too(case: Case) -> None:
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
    """A driver in a process of its own whose trainer waits for the end."""
    command = [sys.executable, "-c", DRIVER, str(tmp_path), request.param, str(Path(__file__).parent)]
    env = os.environ | {"RAY_ADDRESS": ray_address}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "running").exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield process
        process.kill()


def processes(folder: Path) -> list[int]:
    """The process ids in the logs."""
    logs = [log.read_text() for log in (folder / "logs").glob("*.log")]
    return [int(text.split("process ")[1].split()[0]) for text in logs]


@pytest.mark.parametrize("driven", ["polite"], indirect=True)
def test_when_the_driver_is_killed_everything_ends_at_once(driven: "subprocess.Popen[str]", tmp_path: Path) -> None:
    pids = processes(tmp_path)
    assert len(pids) == 2
    driven.kill()
    driven.wait(GUARD_S)
    wait_until_gone(*pids, timeout_s=GUARD_S)


@pytest.mark.parametrize("driven", ["polite"], indirect=True)
def test_the_first_signal_to_end_lets_the_trainer_save_its_work(
    driven: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    driven.send_signal(signal.SIGTERM)
    out, _ = driven.communicate(timeout=GUARD_S)
    assert driven.returncode == 130
    assert "Ctrl-C" in out
    assert len(list(tmp_path.glob("saved-*-7"))) == 1
    wait_until_gone(*processes(tmp_path), timeout_s=GUARD_S)


@pytest.mark.parametrize(("driven", "times"), [("rude", 2), ("no grace", 1)], indirect=["driven"])
def test_the_second_ctrl_c_stops_at_once_and_so_does_the_first_without_a_grace(
    driven: "subprocess.Popen[str]", tmp_path: Path, times: int
) -> None:
    assert driven.stdout is not None
    driven.send_signal(signal.SIGINT)
    if times == 2:
        # The first has been heard when this is said; what is granted is an hour.
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
    """A driver that has started a Ray of its own, in its first attempt or a later one, and waits."""
    (tmp_path / "driver.py").write_text(OWN_CLUSTER)
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path), "", str(Path(__file__).parent)]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    env["TMPDIR"] = str(tmp_path)  # too long for sockets
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        for name in getattr(request, "param", ()):
            end_while_it_starts(process.pid, name)
        while not (tmp_path / "running").exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield process
        process.kill()


def end_while_it_starts(driver: int, name: str) -> None:
    """End a part of Ray as soon as it is there."""
    deadline = time.monotonic() + GUARD_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError, OSError):
            os.kill(of_ray(driver, name), signal.SIGKILL)
            return


def of_ray(driver: int, name: str) -> int:
    """The process of this name that the driver has started."""
    children = Path(f"/proc/{driver}/task").glob("*/children")
    pids = [pid for file in children for pid in file.read_text().split()]
    (found,) = [int(pid) for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == name]
    return found


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_when_a_part_of_our_own_cluster_dies_or_stops_it_is_named_and_all_starts_again_on_a_new_one(
    on_its_own_cluster: "subprocess.Popen[str]", tmp_path: Path, name: str, way: signal.Signals
) -> None:
    os.kill(of_ray(on_its_own_cluster.pid, name), way)
    out, _ = on_its_own_cluster.communicate(timeout=GUARD_S)
    assert on_its_own_cluster.returncode == 0, out
    assert re.search(says(name, "attempt 2"), out)
    assert ast.literal_eval((tmp_path / "result").read_text()) == ([[2], [4]], 2)


@pytest.mark.nightly
@pytest.mark.parametrize("on_its_own_cluster", [["raylet"]], indirect=True)
def test_a_ray_that_does_not_start_is_started_again(on_its_own_cluster: "subprocess.Popen[str]") -> None:
    on_its_own_cluster.send_signal(signal.SIGINT)
    out, _ = on_its_own_cluster.communicate(timeout=GUARD_S)
    assert on_its_own_cluster.returncode == 130, out
    assert re.search(says("Ray did not start", "attempt 2"), out)


def test_a_signal_to_the_whole_process_group_ends_the_run_and_says_what_could_not_be_saved(
    on_its_own_cluster: "subprocess.Popen[str]",
) -> None:
    os.killpg(on_its_own_cluster.pid, signal.SIGTERM)
    out, _ = on_its_own_cluster.communicate(timeout=GUARD_S)
    assert on_its_own_cluster.returncode == 130, out
