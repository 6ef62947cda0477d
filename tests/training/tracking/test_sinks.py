"""Sinks beside metrics.jsonl, and what happens to each when it really fails."""

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.messages import says
from training.tracking import Tracker

PROJECT = Path(__file__).parents[3]


def run_child(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with warnings on stderr."""
    prelude = "import logging\nlogging.basicConfig(format='%(message)s')\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=540,
        cwd=PROJECT,
        env=os.environ | environment,
    )


def read_tensorboard(folder: Path) -> EventAccumulator:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return reader


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_tensorboard(folder).Scalars(tag)]


def test_tensorboard_shows_numbers_and_samples_in_the_run_folder(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "toy", {}, seed=0, tensorboard=True)
    tracker.log(1, {"reward": 0.5, "note": "text", "heads": {"a": 2}, "done": True})
    tracker.log(2, {"reward": 0.25})
    tracker.samples(2, lambda: [{"prompt": "a|b\nc", "reward": 1.0}, {"reward": 0.0, "prompt": f"sk-{'k' * 20}"}])
    # All of it is there at once, not when the tracker is closed.
    folder = tmp_path / "tensorboard"
    assert scalars(folder, "reward") == [(1, 0.5), (2, 0.25)]
    assert scalars(folder, "heads/a") == [(1, 2.0)]
    assert scalars(folder, "done") == [(1, 1.0)]
    (text,) = read_tensorboard(folder).Tensors("samples/text_summary")
    table = "| prompt | reward |\n| --- | --- |\n| a\\|b<br>c | 1.0 |\n| *** | 0.0 |"
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (2, table)


def test_on_resume_tensorboard_drops_the_steps_that_are_done_again(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "toy", {}, seed=0, tensorboard=True)
    for step in (1, 2, 3, 4):
        tracker.log(step, {"try": 1})
    resumed = Tracker(tmp_path, "toy", {}, seed=0, tensorboard=True, resume_step=2)
    resumed.log(3, {"try": 2})
    assert scalars(tmp_path / "tensorboard", "try") == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_tensorboard_goes_to_a_folder_that_is_named_and_is_off_without_one(tmp_path: Path) -> None:
    elsewhere = tmp_path / "logs"
    Tracker(tmp_path / "run", "toy", {}, seed=0, tensorboard=elsewhere).log(1, {"reward": 0.5})
    assert scalars(elsewhere, "reward") == [(1, 0.5)]
    for option in (False, ""):
        tracker = Tracker(tmp_path / "run", "toy", {}, seed=0, tensorboard=option)
        tracker.samples(1, lambda: [{"prompt": "for nobody"}])
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_without_tensorboard_the_run_goes_on_and_one_warning_says_what_to_install(tmp_path: Path) -> None:
    # An environment that has what the tracker needs and no more.
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "yaml").symlink_to(Path(yaml.__file__).parent)
    code = f"""
    import sys
    sys.path = [{str(PROJECT)!r}, {str(tmp_path / "packages")!r}, *(p for p in sys.path if "site-packages" not in p)]
    from training.tracking import Tracker
    tracker = Tracker(sys.argv[1], "toy", {{}}, 0, tensorboard=True)
    tracker.log(1, {{"reward": 0.5}})
    tracker.close()
    """
    done = run_child(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    (warning,) = done.stderr.splitlines()
    facts = ("TensorBoard", tmp_path / "run", "No module named 'tensorboard'", "pip install tensorboard")
    assert re.search(says(*facts), warning)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["reward"] == 0.5


def test_a_disk_that_is_full_switches_each_file_off_with_one_warning(tmp_path: Path) -> None:
    # RLIMIT_FSIZE makes every write beyond the limit fail, as a full disk does, also for root.
    code = """
    import resource, signal, sys
    from dataclasses import dataclass
    import torch
    from components.batch import Batch
    from training.tracking import EventLog, Tracker

    @dataclass
    class Note:
        text: str

    tracker = Tracker(sys.argv[1], "toy", {}, 0, tensorboard=True)
    events = EventLog(sys.argv[1] + "/events.jsonl")
    batch = Batch([40_000], {"tokens": torch.arange(40_000)})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    for step in range(1, 40):
        tracker.log(step, {"reward": 0.5, "note": "x" * 100})
        tracker.rollouts(step, batch)
        tracker.samples(step, lambda: [{"prompt": "x" * 100}])
        events(Note("x" * 100))
    tracker.update_summary(steps=step)
    tracker.close()
    events.close()
    """
    done = run_child(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    warnings = done.stderr.splitlines()
    for name in ("metrics.jsonl", "rollouts", "TensorBoard", "events.jsonl"):
        (warning,) = [line for line in warnings if name in line]
        assert re.search(says(tmp_path, "OSError: [Errno 27]"), warning)
    assert len(warnings) == 4
    # What could be written is whole, and nothing lies about.
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 39
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")
    assert [json.loads(line)["step"] for line in lines[:-1]] == list(range(1, len(lines)))
    assert scalars(tmp_path / "tensorboard", "reward")
    assert list((tmp_path / "rollouts").iterdir()) == []
    # The resumed run, with room again, continues with the steps that are whole.
    tracker = Tracker(tmp_path, "toy", {}, seed=0, resume_step=len(lines))
    tracker.log(len(lines) + 1, {"reward": 1.0})
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, len(lines)), len(lines) + 1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts", "tensorboard", "environment.json", "config.yaml"])
def test_what_stands_in_the_way_of_a_file_costs_one_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A folder where a file should go, and a file where a folder should: nobody can write there, root included.
    if name in ("rollouts", "tensorboard"):
        (tmp_path / name).write_text("")
    else:
        (tmp_path / name).mkdir()
    tracker = Tracker(tmp_path, "toy", {}, seed=0, tensorboard=True)
    for step in (1, 2):
        tracker.log(step, {"reward": 1.0})
    tracker.update_summary(steps=2)
    tracker.close()
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    shown = {"tensorboard": "TensorBoard"}.get(name, name)
    assert re.search(says(shown, tmp_path), warning)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


def test_a_file_that_was_closed_switches_its_sink_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker(tmp_path, "toy", {}, seed=0, tensorboard=True)
    tracker.log(1, {"reward": 1.0})
    for sink in tracker._sinks.values():
        sink.close()
    for step in (2, 3):
        tracker.log(step, {"reward": 1.0})
    first, second = sorted(record.message for record in caplog.records)
    assert re.search(says("TensorBoard", tmp_path), first)
    assert re.search(says("metrics.jsonl", tmp_path), second)
