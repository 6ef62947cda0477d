"""Whole jobs: how they end, well and badly, and that nothing of them is left."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core import CallEvent, Job, JobBuilder, JobError, JobEvent, JobResult, Role, RoleGroup
from core.backends.ray import check_reachable

pytestmark = pytest.mark.usefixtures("ray_cluster")


def run(script: Callable[[Any], None], **options: Any) -> JobResult:
    """A trainer that runs `script(trainer)`, and two actor ranks."""
    builder = JobBuilder().device_type("CPU").config(script).recovery(max_restarts=0)
    builder.role("trainer").run("workers.Script").resource(cpu=0.5)
    builder.role("actor").train("workers.Echo").total(2).resource(cpu=0.5)
    return builder.build().submit("test", **options)


def left_behind(result: JobResult) -> list[str]:
    """Whatever of the run is still there: shared memory, actors, placement groups."""
    import ray
    from ray.util import placement_group_table

    found = [str(path) for path in Path("/dev/shm").glob(f"troupe-{result.run_id}*")]
    actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    found += [actor["name"] for actor in actors if result.run_id in actor["name"]]
    groups = placement_group_table().values()
    return found + [g["name"] for g in groups if result.run_id in g["name"] and g["state"] != "REMOVED"]


def test_the_trainer_has_one_role_group_per_other_role_and_the_job_ends_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def script(trainer: Any) -> None:
        assert trainer.get_role_groups() == ["RG_ACTOR"]
        assert trainer.RG_ACTOR.echo([5, 6]) == [(0, [5]), (1, [6])]
        assert len(trainer.actors) == 2
        assert trainer.critics == []
        assert trainer.get_workload_resource(Role.ACTOR) == {"cpu": 0.5, "accelerator": 0.0, "memory": 0}
        with pytest.raises(AttributeError, match="no RG_CRITIC; it has RG_ACTOR"):
            _ = trainer.RG_CRITIC

    result = run(script)
    assert (result.status, result.error, result.exit_code) == ("finished", "", 0)
    assert "hello from TRAINER-0" in capsys.readouterr().out
    assert result.peak_memory_bytes > 10 * 2**20
    assert left_behind(result) == []


def test_an_error_in_a_worker_ends_the_job_with_its_type_message_and_place(tmp_path: Path) -> None:
    result = run(lambda trainer: trainer.RG_ACTOR.fail(1), log_dir=tmp_path)
    assert (result.status, result.exit_code) == ("failed", 1)
    assert result.error.startswith("KeyError: 'lost in rank 1'")
    assert "raised by ACTOR-1 in fail" in result.error
    assert "hello from TRAINER-0" in (tmp_path / "trainer-0.log").read_text()
    assert (tmp_path / "actor-1.log").read_text().startswith("ACTOR-1: process ")
    assert left_behind(result) == []


@pytest.mark.parametrize("idle", [False, True])
def test_a_killed_worker_ends_the_job_in_one_line_that_names_it(idle: bool) -> None:
    def die_in_a_call(trainer: Any) -> None:
        trainer.RG_ACTOR.die(1)

    def kill_idle(trainer: Any) -> None:
        trainer.RG_ACTOR.die_soon(0)
        time.sleep(60)

    began = time.monotonic()
    result = run(kill_idle if idle else die_in_a_call)
    assert (result.status, result.exit_code) == ("failed", 1)
    assert result.error.startswith(f"ACTOR-{0 if idle else 1} (process ")
    assert "\n" not in result.error
    assert time.monotonic() - began < 30
    assert left_behind(result) == []


def test_a_killed_trainer_ends_the_job() -> None:
    result = run(lambda trainer: os.kill(os.getpid(), signal.SIGKILL))
    assert result.error.startswith("TRAINER-0 (process ")
    assert left_behind(result) == []


def test_a_workload_that_cannot_be_set_up_ends_the_job_before_the_trainer_starts() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("trainer").run("workers.Script").resource(cpu=0.5)
    builder.role("tool").run("workers.FailsAtStart").resource(cpu=0.5)
    result = builder.build().submit("test")
    assert result.error == "RuntimeError: no such model (in TOOL-0)"
    assert left_behind(result) == []


def test_a_stub_that_does_not_fit_stops_the_job_at_its_start() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("tool").run("workers.WrongStub").resource(cpu=0.5)
    assert "does not fit workers.WrongStub.method(a: int)" in builder.build().submit("test").error


def test_a_class_that_is_wrapped_for_ray_is_unwrapped(capsys: pytest.CaptureFixture[str]) -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("wrapped").run("wrapped.Wrapped").resource(cpu=0.5)
    assert builder.build().submit("test").status == "finished"
    assert "wrapped ran as WRAPPED-0" in capsys.readouterr().out


def test_a_job_that_does_not_block_is_waited_for_or_stopped_from_here() -> None:
    builder = JobBuilder().device_type("CPU").config(lambda trainer: time.sleep(60)).recovery(max_restarts=0)
    builder.role("trainer").run("workers.Script").resource(cpu=0.5)
    running = builder.build().submit("test", blocking=False)
    assert not running.done()
    with pytest.raises(TimeoutError, match=r"has not ended after 0.2 s"):
        running.result(0.2)
    running.stop()
    result = running.result(60)
    assert (result.status, result.exit_code) == ("stopped", 130)
    assert left_behind(result) == []


def test_a_job_that_does_not_block_is_told_to_stop_and_saves_its_work(tmp_path: Path) -> None:
    saved = tmp_path / "saved"

    def until_stopped(trainer: Any) -> None:
        (tmp_path / "began").touch()
        while not trainer.stop_requested:
            time.sleep(0.01)
        saved.touch()

    builder = JobBuilder().device_type("CPU").config(until_stopped).recovery(stop_grace=30)
    builder.role("trainer").run("workers.Script").resource(cpu=0.5)
    running = builder.build().submit("test", blocking=False)
    while not (tmp_path / "began").exists():
        assert not running.done()
        time.sleep(0.05)
    running.stop()
    assert (running.result(30).status, saved.exists()) == ("stopped", True)


@pytest.mark.parametrize(("code", "status"), [(0, "finished"), (None, "finished"), (2, "failed")])
def test_a_trainer_that_leaves_by_sys_exit_ends_the_job_as_its_code_says(code: Any, status: str) -> None:
    assert run(lambda trainer: sys.exit(code)).status == status


def test_a_process_group_is_made_before_the_workload_if_the_job_says_so() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("ranks").train("workers.Grouped").total(2).resource(cpu=0.5).process_group()
    builder.role("others").train("workers.Grouped").total(2).resource(cpu=0.5)
    with builder.build().running("groups"):
        assert RoleGroup("ranks").call("sum_of_ranks").result() == [1, 1]
        assert RoleGroup("others").call("sum_of_ranks").result() == [None, None]


def test_a_plan_that_was_read_back_runs(tmp_path: Path) -> None:
    builder = JobBuilder().device_type("CPU").config({"answer": 42})
    builder.role("plain").run("workers.Plain").resource(cpu=0.5)
    file = tmp_path / "plan.json"
    file.write_text(builder.build().model_dump_json())
    assert Job.model_validate_json(file.read_text()).submit("again").status == "finished"


def test_a_resource_that_the_cluster_lacks_is_named() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("plain").run("workers.Plain").resource(cpu=0.5, fpga=2)
    assert "the job needs 2 fpga, but the cluster has 0 in all" in builder.build().submit("test").error


def test_a_plain_class_with_run_is_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("plain").run("workers.Plain").total(2).resource(cpu=0.5)
    assert builder.build().submit("test").status == "finished"
    assert capsys.readouterr().out.count("plain ran") == 2


def test_a_warning_of_the_users_code_reaches_the_terminal_and_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(lambda trainer: trainer.RG_ACTOR.warn("the disk is full"), log_dir=tmp_path).status == "finished"
    assert "warning: the disk is full\n" in capsys.readouterr().out
    assert "WARNING my.code: the disk is full" in (tmp_path / "actor-0.log").read_text()


def test_two_jobs_run_one_after_the_other_under_the_same_name() -> None:
    first, second = run(lambda trainer: None), run(lambda trainer: None)
    assert (first.status, second.status) == ("finished", "finished")
    assert first.run_id != second.run_id


def test_two_jobs_of_one_name_run_side_by_side_without_meeting() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("actor").train("workers.Echo").total(2).resource(cpu=0.5)
    job = builder.build()
    with job.running("same"):
        first = RoleGroup("ACTOR").identity()
        with job.running("same"):
            second = RoleGroup("ACTOR").identity()
        assert RoleGroup("ACTOR").echo([1, 2]) == [(0, [1]), (1, [2])]
    ports = [worker[4] for worker in (*first, *second)]
    assert ports[0] == ports[1] != ports[2] == ports[3]


def test_observers_hear_when_each_call_begins_and_ends_and_a_failing_one_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Any] = []

    def broken(event: Any) -> None:
        raise OSError("disk full")

    def script(trainer: Any) -> None:
        trainer.RG_ACTOR.echo(b"1234")
        with pytest.raises(KeyError):
            trainer.RG_ACTOR.fail(1)
        trainer.tell(JobResult(run_id="of my own", status="finished"))

    assert run(script, observers=[broken, heard.append]).status == "finished"
    calls = [event for event in heard if isinstance(event, CallEvent) and event.role == "ACTOR"]
    told = [(call.rank, call.method, call.bytes, call.seconds is not None, call.failed) for call in calls]
    for rank in (0, 1):
        assert [(name, *rest) for r, name, *rest in told if r == rank] == [
            ("echo", 4, False, False),
            ("echo", 4, True, False),
            ("fail", 0, False, False),
            ("fail", 0, True, rank == 1),
        ]
    assert [event.kind for event in heard if isinstance(event, JobEvent)] == ["start", "end"]
    assert [event.run_id for event in heard if isinstance(event, JobResult)] == ["of my own"]
    assert caplog.text.count("failed and is switched off") == 1


def test_shared_folders_of_killed_runs_are_swept_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    import json
    import socket

    from core.shared_memory import process_start, sweep_shared

    for name, pid, started in (("dead", 2**22 + 1, "1"), ("living", os.getpid(), process_start(os.getpid()))):
        folder = tmp_path / f"troupe-{name}"
        folder.mkdir()
        (folder / "owner.json").write_text(json.dumps({"host": socket.gethostname(), "pid": pid, "started": started}))
    assert [path.name for path in sweep_shared(tmp_path)] == ["troupe-dead"]
    assert [path.name for path in tmp_path.iterdir()] == ["troupe-living"]


def test_a_trainer_knows_what_memory_the_job_takes() -> None:
    def script(trainer: Any) -> None:
        own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        deadline = time.monotonic() + 90
        # Three processes, which share what Python is made of; they tell one after the other.
        while trainer.job_memory_bytes < 1.2 * own / 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert 1.2 * own / 3 < trainer.job_memory_bytes < 2**32

    result = run(script)
    assert result.status == "finished", result.error


def test_a_cluster_that_does_not_answer_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_reachable(address)
        check_reachable(f"[127.0.0.1]:{server.getsockname()[1]}")  # as addresses of IPv6 are written
    for elsewhere in ("auto", "ray://127.0.0.1:1"):  # these Ray looks for itself
        check_reachable(elsewhere)
    with pytest.raises(JobError, match=f"no Ray cluster answers at {address} .*; start it, or unset RAY_ADDRESS"):
        check_reachable(address)
