"""Local mode: a whole job in one process, for breakpoints."""

import gc
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workers

from core import CallEvent, Job, JobBuilder, JobError, JobEvent, JobResult, RoleGroup
from core.backends.local import copied
from core.shared_memory import LINKED, claim_shared, leave_shared, machine_id, process_start, sweep_shared
from core.supervise.worker_process import load_object
from tests.messages import says

HERE = Path(__file__).parent


def run(script: Callable[[Any], None], **options: Any) -> JobResult:
    """Run a job of a trainer that calls `script(trainer)`, and two instances of Echo."""
    builder = JobBuilder().device_type("CPU").config(script).recovery(max_restarts=0)
    builder.role("trainer").run("workers.Script")
    builder.role("actor").run("workers.Echo").total(2)
    return builder.build().submit("test", backend="local", **options)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_collection_is_disabled_while_a_workload_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    (tmp_path / f"seen_{collects}.py").write_text("import gc\n\n\nclass During:\n    collects = gc.isenabled()\n")
    (tmp_path / "broken_here.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        {True: gc.enable, False: gc.disable}[collects]()
        assert load_object(f"seen_{collects}:During").collects is False
        assert gc.isenabled() is collects
        with pytest.raises(ZeroDivisionError):
            load_object("broken_here:During")
        assert gc.isenabled() is collects
    finally:
        gc.enable()


def test_a_job_has_the_same_result_as_on_ray(capsys: pytest.CaptureFixture[str]) -> None:
    def script(trainer: Any) -> None:
        assert trainer.get_role_groups() == ["RG_ACTOR"]
        assert trainer.RG_ACTOR.echo([5, 6]) == [(0, [5]), (1, [6])]
        with pytest.raises(AttributeError, match=says("RG_CRITIC", "RG_ACTOR")):
            _ = trainer.RG_CRITIC

    result = run(script)
    assert (result.status, result.error, result.exit_code, result.attempt) == ("finished", "", 0, 1)
    assert "hello from TRAINER-0" in capsys.readouterr().out
    assert result.peak_memory_bytes > 10 * 2**20
    assert list(Path("/dev/shm").glob(f"troupe-{result.run_id}*")) == []


def test_a_failure_has_the_same_message_as_on_ray() -> None:
    result = run(lambda trainer: trainer.RG_ACTOR.fail(1))
    assert (result.status, result.exit_code) == ("failed", 1)
    assert re.search(says("KeyError: 'lost in rank 1'", "ACTOR-1", "fail", "TRAINER-0"), result.error)
    assert "workers.py" in result.traceback
    builder = JobBuilder().device_type("CPU")
    builder.role("trainer").run("workers.Script")
    builder.role("tool").run("workers.FailsAtStart")
    assert re.search(
        says("RuntimeError: no such model", "TOOL-0"), builder.build().submit("test", backend="local").error
    )


def test_neither_ray_nor_torch_is_imported() -> None:
    code = """
import sys
sys.modules["ray"] = None  # makes an import of it fail
from core import JobBuilder, RoleGroup
builder = JobBuilder()
builder.role("a").run("workers:Plain").total(2)
with builder.build().running("plain", backend="local"):
    print(RoleGroup("a").call("answer").result(), "torch" in sys.modules)
print(builder.build().submit(backend="local").status)
"""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["[42, 42] False", "plain ran", "plain ran", "finished"], done.stderr


def test_several_ranks_of_a_train_role_raise_an_error_before_anything_starts() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("actor").train("workers.Echo").total(2)
    job = builder.build()
    for start in (lambda: job.submit(backend="local"), lambda: job.running("x", backend="local").__enter__()):
        with pytest.raises(JobError, match=says("backend=local", "ACTOR", 2, "backend=ray")):
            start()
    with pytest.raises(JobError, match=says("backend='lokal'", "ray", "local")):
        job.submit(backend="lokal")  # pyright: ignore[reportArgumentType]


def test_each_workload_has_its_own_environment_random_state_and_default_dtype() -> None:
    builder = JobBuilder().device_type("CPU").global_env({"COLOUR": "red"})
    builder.role("a").run("workers.Settings").env({"COLOUR": "green"})
    builder.role("b").run("workers.Settings")
    before = (dict(os.environ), torch.get_default_dtype(), random.getstate())
    with builder.build().running("settings", backend="local"):
        a = RoleGroup("a")
        b = RoleGroup("b")
        a.change(11)
        drawn = b.change(11)
        # Both have the same seed, and the draws of one do not change the state of the other.
        assert b.draw() == a.draw()
        assert b.draw() == a.draw() != drawn
        assert a.look()[0][:2] == ("green", "torch.float64")
        assert (dict(os.environ), torch.get_default_dtype(), random.getstate()) == before
        assert b.look()[0][0] == "red"


def test_arguments_are_copies_with_read_only_arrays_and_the_same_functions() -> None:
    value = {"list": [1], "array": np.arange(3), "tensor": torch.arange(3), "function": run, "class": JobResult}
    copy = copied(value)
    assert copy["list"] == [1]
    assert copy["list"] is not value["list"]
    assert (copy["function"], copy["class"]) == (run, JobResult)
    value["array"][0] = value["tensor"][0] = 9
    assert (copy["array"].tolist(), copy["tensor"].tolist()) == ([0, 1, 2], [0, 1, 2])
    with pytest.raises(ValueError, match="read-only"):
        copy["array"][0] = 1
    with pytest.raises(TypeError, match="cannot pickle"):
        copied(threading.Lock())


def test_a_breakpoint_stops_the_callers_thread_and_does_not_cause_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("a").run("workers.Stops")
    stops: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(threading.current_thread().name))
    with builder.build().running("stops", backend="local"):
        group = RoleGroup("a")
        assert group.stop_and_take_long() == [1]
        assert group.call("stop_and_take_long").result(0.1) == [1]
    assert stops == ["MainThread"] * 2


def test_the_state_of_the_process_is_restored_after_a_job() -> None:
    before = (dict(os.environ), torch.get_num_threads(), torch.get_default_dtype())
    builder = JobBuilder().device_type("CPU")
    builder.role("a").run("workers.Settings").resource(cpu=3).env({"COLOUR": "green"})
    with builder.build().running("settings", backend="local"):
        assert RoleGroup("a").change(1)
        assert torch.get_num_threads() == 3
    assert (dict(os.environ), torch.get_num_threads(), torch.get_default_dtype()) == before


def test_a_debugger_reads_from_the_terminal_in_any_role(tmp_path: Path) -> None:
    (tmp_path / "debugged.py").write_text(
        "from core import BaseTrainer, BaseWorkload, JobBuilder, trainer_invocation\n"
        "class Tool(BaseWorkload):\n"
        "    @trainer_invocation\n"
        "    def add(self, value: int) -> int:\n"
        "        breakpoint()\n"
        "        return value + 1\n"
        "class Trainer(BaseTrainer):\n"
        "    def init(self) -> None: ...\n"
        "    def fit(self) -> None:\n"
        "        self.info(f'answer {self.RG_TOOL.add(1)}')\n"
        "if __name__ == '__main__':\n"
        "    builder = JobBuilder()\n"
        "    builder.role('trainer').run('debugged:Trainer')\n"
        "    builder.role('tool').run('debugged:Tool')\n"
        "    print(builder.build().submit(backend='local').status)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE.parents[1])])}
    env.pop("PYTHONBREAKPOINT", None)  # Ray sets it when it starts
    done = subprocess.run(
        [sys.executable, "debugged.py"],
        input="p ('at', self.name, value)\nvalue = 41\ncontinue\n",
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert "('at', 'TOOL-0', 1)" in done.stdout, done.stderr
    assert [text.removeprefix("(Pdb) ") for text in done.stdout.splitlines()[-2:]] == ["(Pdb) answer [42]", "finished"]


def test_calls_whose_result_is_not_awaited_run_in_order() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("a").run("workers.Settings")
    with builder.build().running("order", backend="local"):
        group = RoleGroup("a")
        for number in range(3):
            group.call("note", number)
        assert group.call_rank0("note", 3).result() == [0, 1, 2, 3]


def test_observers_receive_events_of_every_call_and_of_the_job() -> None:
    seen: list[Any] = []
    assert run(lambda trainer: trainer.RG_ACTOR.echo(1), observers=[seen.append]).status == "finished"
    calls = [(e.role, e.rank, e.method, e.seconds is None) for e in seen if isinstance(e, CallEvent)]
    assert calls == [
        ("TRAINER", 0, "run", True),
        ("ACTOR", 0, "echo", True),
        ("ACTOR", 0, "echo", False),
        ("ACTOR", 1, "echo", True),
        ("ACTOR", 1, "echo", False),
        ("TRAINER", 0, "run", False),
    ]
    assert [e.kind for e in seen if isinstance(e, JobEvent)] == ["start", "end"]


def test_ctrl_c_lets_the_trainer_save_its_state(tmp_path: Path) -> None:
    code = f"""
import json, os, signal, sys, threading, time
sys.path[:0] = {[str(HERE), str(HERE.parents[1])]!r}
from core import JobBuilder

def script(trainer):
    os.kill(os.getpid(), signal.SIGINT)
    trainer.RG_ACTOR.echo(1)
    while not trainer.stop_requested:
        time.sleep(0.01)
    open({str(tmp_path / "saved")!r}, "w").write("kept")
    if trainer.config is twice:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()

def twice(trainer):
    script(trainer)

results = []
for config in (script, twice):
    builder = JobBuilder().config(config).recovery(stop_grace=3600)
    builder.role("trainer").run("workers.Script")
    builder.role("actor").run("workers.Echo")
    result = builder.build().submit(backend="local")
    results.append((result.status, result.exit_code, os.path.exists({str(tmp_path / "saved")!r})))
print(json.dumps(results))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [["stopped", 130, True]] * 2, done.stderr


def test_a_warning_of_a_workload_is_shown_at_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda trainer: trainer.RG_ACTOR.warn("the disk is full")).status == "finished"
    assert "warning: the disk is full\n" in capsys.readouterr().out
    workers.logging.getLogger("my.code").warning("nobody listens any more")
    assert "nobody listens" not in capsys.readouterr().out


@pytest.mark.parametrize(("code", "status"), [(0, "finished"), (None, "finished"), (2, "failed")])
def test_the_status_of_a_job_follows_the_trainers_sys_exit_code(code: Any, status: str) -> None:
    assert run(lambda trainer: sys.exit(code)).status == status


def test_a_stub_with_wrong_parameters_fails_the_job_at_its_start() -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("tool").run("workers.WrongStub")
    error = builder.build().submit("test", backend="local").error
    assert re.search(says("workers.stub_with_two(a: int, b: int)", "workers.WrongStub.method(a: int)"), error)


def test_a_class_wrapped_by_ray_remote_is_unwrapped(capsys: pytest.CaptureFixture[str]) -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("wrapped").run("wrapped.Wrapped")
    assert builder.build().submit("test", backend="local").status == "finished"
    assert "wrapped ran as WRAPPED-0" in capsys.readouterr().out


def test_a_job_restored_from_json_can_run_twice_under_one_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = JobBuilder().device_type("CPU").config({"answer": 42})
    builder.role("plain").run("workers.Plain").total(2)
    file = tmp_path / "plan.json"
    file.write_text(builder.build().model_dump_json())
    job = Job.model_validate_json(file.read_text())
    first, second = (job.submit("again", backend="local") for _ in range(2))
    assert (first.status, second.status) == ("finished", "finished")
    assert first.run_id != second.run_id
    assert capsys.readouterr().out.count("plain ran") == 4


def test_shared_folders_of_dead_runs_are_removed_and_those_of_live_runs_are_kept(tmp_path: Path) -> None:
    dead = {"machine": machine_id(), "pid": 2**22 + 1, "started": "1"}
    reused = {"machine": machine_id(), "pid": os.getpid(), "started": "1"}
    living = {"machine": machine_id(), "pid": os.getpid(), "started": process_start(os.getpid())}
    elsewhere = dead | {"machine": "another boot"}
    folders = {"dead": [dead, reused], "living": [dead, living], "elsewhere": [elsewhere], "of nobody": []}
    for name, owners in folders.items():
        folder = tmp_path / f"troupe-{name}" / "owners"
        folder.mkdir(parents=True)
        for number, owner in enumerate(owners):
            (folder / f"{number}.json").write_text(json.dumps(owner))
        (tmp_path / name).mkdir()
        (folder.parent / LINKED).symlink_to(tmp_path / name)
    assert [path.name for path in sweep_shared(tmp_path)] == ["troupe-dead"]
    assert [name for name in folders if not (tmp_path / name).exists()] == ["dead"]


def test_a_folder_of_another_user_is_neither_read_nor_removed(tmp_path: Path) -> None:
    folder = tmp_path / "troupe-trap"
    (folder / "owners").mkdir(parents=True)
    os.mkfifo(folder / "owners" / "1.json")  # reading it would block for ever
    os.chown(folder, 65534, 65534)
    assert sweep_shared(tmp_path) == []
    assert folder.is_dir()


def test_the_shared_folder_of_a_run_is_accessible_to_its_user_only(tmp_path: Path) -> None:
    claim_shared(tmp_path / "troupe-run")
    assert (tmp_path / "troupe-run").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("other_lives", [True, False])
def test_only_the_last_process_of_a_machine_removes_the_shared_folder(tmp_path: Path, other_lives: bool) -> None:
    folder = tmp_path / "troupe-run"
    claim_shared(folder)
    (folder / "weights").touch()
    started = {True: process_start(1), False: "never"}
    other = {"machine": machine_id(), "pid": 1, "started": started[other_lives]}
    (folder / "owners" / "1.json").write_text(json.dumps(other))
    leave_shared(folder)
    assert (folder / "weights").exists() is other_lives
    leave_shared(folder)  # also works if the folder has been removed already
