"""Sinks besides metrics.jsonl, and the effect of real failures on each."""

import json
import logging
import re
from pathlib import Path

import pytest

from tests.messages import says
from tests.plugins.tensorboard.test_sink import run_child, scalars
from training.tracking import Tracker


def test_a_full_disk_disables_each_output_file_with_one_warning(tmp_path: Path) -> None:
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

    tracker = Tracker(sys.argv[1], "toy", {}, 0, sinks={"tensorboard": {}})
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
    # Written data is complete, and no temporary file is left.
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 39
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")
    assert [json.loads(line)["step"] for line in lines[:-1]] == list(range(1, len(lines)))
    assert scalars(tmp_path / "tensorboard", "reward")
    assert list((tmp_path / "rollouts").iterdir()) == []
    # The resumed run, with free space again, continues after the complete steps.
    tracker = Tracker(tmp_path, "toy", {}, seed=0, resume_step=len(lines))
    tracker.log(len(lines) + 1, {"reward": 1.0})
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, len(lines)), len(lines) + 1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts", "tensorboard", "environment.json", "config.yaml"])
def test_an_obstructed_output_path_logs_one_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A folder at the path of a file, and a file at the path of a folder: nobody can write there, including root.
    if name in ("rollouts", "tensorboard"):
        (tmp_path / name).write_text("")
    else:
        (tmp_path / name).mkdir()
    tracker = Tracker(tmp_path, "toy", {}, seed=0, sinks={"tensorboard": {}})
    for step in (1, 2):
        tracker.log(step, {"reward": 1.0})
    tracker.update_summary(steps=2)
    tracker.close()
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    shown = {"tensorboard": "TensorBoard"}.get(name, name)
    assert re.search(says(shown, tmp_path), warning)
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


def test_a_closed_file_disables_its_sink(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker(tmp_path, "toy", {}, seed=0, sinks={"tensorboard": {}})
    tracker.log(1, {"reward": 1.0})
    for sink in tracker._sinks.values():
        sink.close()
    for step in (2, 3):
        tracker.log(step, {"reward": 1.0})
    first, second = sorted(record.message for record in caplog.records)
    assert re.search(says("TensorBoard", tmp_path), first)
    assert re.search(says("metrics.jsonl", tmp_path), second)
