"""A job from its folder to its exit code, and the threads of its processes."""

import json
import os
import time
from pathlib import Path

import pytest

from components import registry
from core import JobBuilder
from plugins.resume.continuation import continued_run
from tests.messages import says
from tests.training.run.checkpoint_steps import save
from training.launch.launch import GUARDS, missing_defaults, run_job, threads_each, threads_text
from training.options.checkpoint_options import CheckpointOptions
from training.options.model_options import ModelOptions
from training.options.supervised_options import ExampleOptions, SupervisedOptions
from training.run.checkpoint import Checkpoints
from training.tracking import Tracker, finish_summary, open_run_folder


def test_workers_share_the_cores_and_each_has_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert [threads_each(workers) for workers in (1, 2, 3, 9)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # a list, for nested regions, is not a number of cores
    assert threads_each(1) == len(os.sched_getaffinity(0))


def test_on_a_cluster_the_cores_of_this_machine_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert [threads_each(*each) for each in [(1,), (8,), (8, 2), (9, 2), (1, 2)]] == [-1, -8, -4, -5, -1]
    assert [threads_text(threads) for threads in (-1, -4, 1, 2)] == [
        "all cores",
        "1/4 of the cores",
        "1 thread",
        "2 threads",
    ]


@pytest.mark.parametrize("elsewhere", [None, "~/kept"])
def test_a_new_run_in_a_folder_with_checkpoints_is_refused(
    elsewhere: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save(Checkpoints(elsewhere or tmp_path / "run/checkpoints"), 3)
    config = SupervisedOptions(
        run_dir="~/run",
        resume="none",
        model=ModelOptions(path="new:sort"),
        data=ExampleOptions(path="task:sort"),
        checkpoint=CheckpointOptions(path=elsewhere),
    )
    with pytest.raises(ValueError, match=says("step_3", "resume=auto")):
        continued_run(config, "demo")
    assert not (tmp_path / "run" / "summary.json").exists()
    config.resume = "auto"
    continued = continued_run(config, "demo")
    assert continued is not None
    assert continued.folder.name == "step_3"


def test_a_command_that_fails_early_keeps_the_record_of_the_previous_run(tmp_path: Path) -> None:
    for status in ("finished", "stopped"):
        Tracker(tmp_path, "toy", {}, seed=0).update_summary(steps=4)
        finish_summary(tmp_path, status)
        before = (tmp_path / "summary.json").read_bytes()
        finish_summary(tmp_path, "failed", "no room", recipe="toy", seed=1, attempts=1)
        assert (tmp_path / "summary.json").read_bytes() == before
    Tracker(tmp_path, "toy", {}, seed=0, resume_step=2)
    finish_summary(tmp_path, "failed", "it broke", recipe="toy", seed=0)
    assert json.loads((tmp_path / "summary.json").read_text())["error"] == "it broke"


@pytest.mark.parametrize(
    ("role", "code", "status", "error"),
    [
        ("Works", 0, "finished", None),
        ("Fails", 1, "failed", "ValueError: there are no numbers; set numbers=FILE (in A-0)"),
    ],
)
def test_exit_code_summary_and_last_line_agree_on_the_end_of_a_job(
    role: str, code: int, status: str, error: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = JobBuilder().device_type("CPU")
    builder.role("a").run(f"tests.training.launch.launch_roles.{role}")
    run_dir = open_run_folder(str(tmp_path / "run"))
    exit_code = run_job(
        builder.build(),
        recipe="demo",
        run_dir=run_dir,
        seed=7,
        backend="local",
        began=time.time(),
        lines=["on CPU"],
        seconds={"warm_start": 1.5},
    )
    assert exit_code == code
    shown = capsys.readouterr()
    assert shown.out.startswith(f"demo: run folder {run_dir}\ndemo: on CPU\n")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["recipe"], summary["seed"], summary["attempts"]) == (status, "demo", 7, 1)
    assert summary["seconds"]["warm_start"] == 1.5
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["event"] == "job"] == ["start", "end"]
    assert summary["error"] == error
    # Without processes there are no logs to name.
    assert shown.err.splitlines()[-1:] == ([f"demo: failed: {error}"] if error else [])


def test_missing_capabilities_are_listed_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_defaults() == []
    monkeypatch.setattr("training.launch.launch.names", lambda kind: ["monitoring"] if kind == "run observer" else [])
    *_, line = missing_defaults()
    assert "alarms, live view, report, utilisation of GPUs" in line


@pytest.mark.parametrize("plugin", GUARDS)
def test_each_missing_guard_is_reported_in_its_own_line(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, effect = GUARDS[plugin]
    # The registry has an entry of this kind, and of no other folder than the plug-in's.
    assert [entry.package for (of_kind, _), entry in registry._provided().items() if of_kind == kind] == (
        [f"plugins.{plugin}"] * len(registry.names(kind))
    )
    monkeypatch.setattr("training.launch.launch.names", lambda of: [] if of == kind else registry.names(of))
    assert missing_defaults() == [f"plug-in {plugin} is missing: {effect}"]
