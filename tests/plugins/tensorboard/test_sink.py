"""TensorBoard as a metric sink."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.messages import says
from training.tracking import Tracker

PROJECT = Path(__file__).parents[3]


def run_child(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a child process, with warnings on stderr."""
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
    tracker = Tracker(tmp_path, "toy", {}, seed=0, sinks={"tensorboard": {}})
    tracker.log(1, {"reward": 0.5, "note": "text", "heads": {"a": 2}, "done": True})
    tracker.log(2, {"reward": 0.25})
    tracker.samples(2, lambda: [{"prompt": "a|b\nc", "reward": 1.0}, {"reward": 0.0, "prompt": f"sk-{'k' * 20}"}])
    # Everything is written immediately, before the tracker is closed.
    folder = tmp_path / "tensorboard"
    assert scalars(folder, "reward") == [(1, 0.5), (2, 0.25)]
    assert scalars(folder, "heads/a") == [(1, 2.0)]
    assert scalars(folder, "done") == [(1, 1.0)]
    (text,) = read_tensorboard(folder).Tensors("samples/text_summary")
    table = "| prompt | reward |\n| --- | --- |\n| a\\|b<br>c | 1.0 |\n| *** | 0.0 |"
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (2, table)


def test_tensorboard_drops_repeated_steps_of_a_resumed_run(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "toy", {}, seed=0, sinks={"tensorboard": {}})
    for step in (1, 2, 3, 4):
        tracker.log(step, {"try": 1})
    resumed = Tracker(tmp_path, "toy", {}, seed=0, sinks={"tensorboard": {}}, resume_step=2)
    resumed.log(3, {"try": 2})
    assert scalars(tmp_path / "tensorboard", "try") == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_tensorboard_writes_to_the_configured_folder_and_is_off_by_default(tmp_path: Path) -> None:
    elsewhere = tmp_path / "logs"
    Tracker(tmp_path / "run", "toy", {}, seed=0, sinks={"tensorboard": {"folder": str(elsewhere)}}).log(
        1, {"reward": 0.5}
    )
    assert scalars(elsewhere, "reward") == [(1, 0.5)]
    Tracker(tmp_path / "run", "toy", {}, seed=0).samples(1, lambda: [{"prompt": "for nobody"}])
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_without_tensorboard_the_run_continues_with_one_warning(tmp_path: Path) -> None:
    # An environment that has only the packages that the tracker needs.
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "yaml").symlink_to(Path(yaml.__file__).parent)
    code = f"""
    import sys
    sys.path = [{str(PROJECT)!r}, {str(tmp_path / "packages")!r}, *(p for p in sys.path if "site-packages" not in p)]
    from training.tracking import Tracker
    tracker = Tracker(sys.argv[1], "toy", {{}}, 0, sinks={{"tensorboard": {{}}}})
    tracker.log(1, {{"reward": 0.5}})
    tracker.close()
    """
    done = run_child(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    (warning,) = done.stderr.splitlines()
    facts = ("TensorBoard", tmp_path / "run", "No module named 'tensorboard'", "pip install tensorboard")
    assert re.search(says(*facts), warning)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["reward"] == 0.5
