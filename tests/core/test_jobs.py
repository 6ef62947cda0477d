"""Complete jobs: results, failures, and clean-up."""

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from core import CallEvent, JobBuilder, JobEvent, JobResult, RoleGroup
from tests.messages import says
from tests.processes import left_behind

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("ray_cluster")]


def run(script: Callable[[Any], None], **options: Any) -> JobResult:
    """Run a job of a trainer that calls `script(trainer)`, and two actor ranks."""
    builder = JobBuilder().device_type("CPU").config(script).recovery(max_restarts=0)
    builder.role("trainer").run("workers.Script").resource(cpu=0.5)
    builder.role("actor").train("workers.Echo").total(2).resource(cpu=0.5)
    return builder.build().submit("test", **options)


def test_an_error_in_a_worker_fails_the_job_with_its_type_message_worker_and_method(tmp_path: Path) -> None:
    result = run(lambda trainer: trainer.RG_ACTOR.fail(1), log_dir=tmp_path)
    assert (result.status, result.exit_code) == ("failed", 1)
    assert re.search(says("KeyError: 'lost in rank 1'", "ACTOR-1", "fail"), result.error)
    assert "hello from TRAINER-0" in (tmp_path / "trainer-0.log").read_text()
    assert (tmp_path / "actor-1.log").read_text().startswith("ACTOR-1: process ")
    assert left_behind(result.run_id) == []


def test_a_killed_worker_fails_a_job_without_restarts_with_one_line_that_names_it() -> None:
    result = run(lambda trainer: trainer.RG_ACTOR.die(1))
    assert (result.status, result.exit_code) == ("failed", 1)
    assert "ACTOR-1" in result.error
    assert "\n" not in result.error
    assert left_behind(result.run_id) == []


def test_an_error_in_setup_fails_the_job_before_the_trainer_starts() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("trainer").run("workers.Script").resource(cpu=0.5)
    builder.role("tool").run("workers.FailsAtStart").resource(cpu=0.5)
    result = builder.build().submit("test")
    assert re.search(says("RuntimeError: no such model", "TOOL-0"), result.error)
    assert left_behind(result.run_id) == []


def test_the_driver_does_not_import_the_classes_of_roles(capsys: pytest.CaptureFixture[str]) -> None:
    builder = JobBuilder().device_type("CPU").config(lambda trainer: trainer.info(f"{trainer.RG_TOOL.one()} in all"))
    builder.role("trainer").run("workers.Script").resource(cpu=0.5)
    builder.role("tool").run("summing.Summing").total(2).resource(cpu=0.5)
    assert builder.build().submit("test").error == ""
    assert "2 in all" in capsys.readouterr().out
    assert "summing" not in sys.modules


def test_the_environment_of_ranks_has_the_variables_for_a_process_group() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("ranks").train("workers.Grouped").total(2).resource(cpu=0.5)
    builder.role("others").run("workers.Grouped").total(1).resource(cpu=0.5)
    with builder.build().running("groups"):
        assert RoleGroup("ranks").call("sum_of_ranks").result() == [1, 1]
        assert RoleGroup("others").call("sum_of_ranks").result() == [None]


def test_missing_resources_are_waited_for_and_named_in_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    builder = JobBuilder().device_type("CPU").recovery(placement_timeout=2)
    builder.role("plain").run("workers.Plain").resource(cpu=1000)
    error = builder.build().submit("test").error
    assert re.search(says("1000 CPU", "the cluster has", "placement_timeout=2"), error)
    assert re.search(says("1000 CPU", "waiting up to 2 s"), capsys.readouterr().out)


def test_messages_beyond_the_size_of_a_pipe_are_read_while_the_block_runs() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("talks").run("workers.Echo").resource(cpu=0.5)
    with builder.build().running("talks"):
        assert RoleGroup("talks").call("talk", 30_000).result() == [30_000]


def test_an_exception_that_cannot_be_pickled_is_replaced_by_one_with_its_type_and_worker() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("odd").run("workers.Echo").resource(cpu=0.5)
    with builder.build().running("odd"), pytest.raises(RuntimeError, match="KeywordsOnly: 7 of 8") as caught:
        RoleGroup("odd").call("fail_oddly").result()
    assert any(re.search(says("ODD-0", "fail_oddly"), note) for note in caught.value.__notes__)


def test_a_warning_of_user_code_is_shown_at_the_terminal_and_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(lambda trainer: trainer.RG_ACTOR.warn("the disk is full"), log_dir=tmp_path).status == "finished"
    assert "warning: the disk is full\n" in capsys.readouterr().out
    assert "WARNING my.code: the disk is full" in (tmp_path / "actor-0.log").read_text()


class Stranger:
    """Ray actor of another program on the same cluster."""

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.nightly
def test_two_jobs_of_one_name_run_concurrently_without_affecting_each_other_or_other_programs() -> None:
    stranger: Any = ray.remote(Stranger).options(num_cpus=0).remote()
    stranger_pid = ray.get(stranger.pid.remote())
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
    assert ray.get(stranger.pid.remote()) == stranger_pid
    ray.kill(stranger)


def test_observers_receive_the_start_and_end_of_each_call_and_a_failing_observer_is_removed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Any] = []

    def broken(event: Any) -> None:
        raise OSError("disk full")

    def script(trainer: Any) -> None:
        trainer.RG_ACTOR.echo(b"1234")
        with pytest.raises(KeyError):
            trainer.RG_ACTOR.fail(1)
        trainer.emit(JobResult(run_id="of my own", status="finished"))

    assert run(script, observers=[broken, seen.append]).status == "finished"
    calls = [event for event in seen if isinstance(event, CallEvent) and event.role == "ACTOR"]
    rows = [(call.rank, call.method, call.bytes, call.seconds is not None, call.failed) for call in calls]
    for rank in (0, 1):
        assert [(name, *rest) for r, name, *rest in rows if r == rank] == [
            ("echo", 4, False, False),
            ("echo", 4, True, False),
            ("fail", 0, False, False),
            ("fail", 0, True, rank == 1),
        ]
    assert [event.kind for event in seen if isinstance(event, JobEvent)] == ["start", "end"]
    assert [event.run_id for event in seen if isinstance(event, JobResult)] == ["of my own"]
    (warning,) = (record.getMessage() for record in caplog.records if "broken" in record.getMessage())
    assert "broken" in warning


def test_a_trainer_can_read_the_memory_of_the_job() -> None:
    def script(trainer: Any) -> None:
        resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        # Three processes share Python's pages, and their memory is reported one after the other.
        while trainer.job_memory_bytes < 1.2 * resident_bytes / 3:
            time.sleep(0.1)
        assert 1.2 * resident_bytes / 3 < trainer.job_memory_bytes < 2**32

    result = run(script)
    assert result.status == "finished", result.error


def test_rays_tools_show_roles_and_methods(tmp_path: Path) -> None:
    from ray._private import state

    builder = JobBuilder().device_type("CPU")
    builder.role("solo").run("workers.Echo").resource(cpu=0.5)
    with builder.build().running("shown"):
        gate = tmp_path / "gate"
        held = RoleGroup("solo").held(gate)
        (actor,) = [actor for actor in state.actors().values() if actor["State"] == "ALIVE"]
        title = Path(f"/proc/{actor['Pid']}/cmdline")
        while "SOLO.held" not in title.read_text():
            time.sleep(0.01)
        gate.touch()
        assert (actor["ActorClassName"], held.result()) == ("SOLO", [0])
