"""Phases by a clock that is told what to show, and checkpoints that are due, best, failed, and gone on from."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import components.progress
from components.checkpoint import CheckpointError, Checkpoints
from components.data.stream import SampleStream
from components.progress import PhaseClock, Progress, RunCheckpoints


def test_phases_that_come_again_are_added_and_a_step_is_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 20.0, 23.5, 30.0, 30.25, 40.0, 41.0])
    monkeypatch.setattr(components.progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    clock = PhaseClock()
    for name in ("generate", "train", "generate"):
        with clock.phase(name):
            pass
    assert clock.take() == {"timing_s/generate": 1.25, "timing_s/train": 3.5, "timing_s/step": 4.75}
    # What was taken is not counted again, and what fails has taken its time too.
    with pytest.raises(KeyError), clock.phase("train"):
        raise KeyError
    assert clock.take() == {"timing_s/train": 1.0, "timing_s/step": 1.0}
    assert clock.take() == {"timing_s/step": 0}


class Box:
    """A run of some steps which counts tokens, and writes its checkpoints into a folder."""

    def __init__(self, folder: Path, *, every: int = -1, steps: int = 5, run_id: str = "a", **config: Any) -> None:
        self.said: list[str] = []
        self.written: list[str] = []
        self.fault: OSError | None = None
        self.stream = SampleStream(lambda step: step, steps)
        self.progress = Progress()
        self.checkpoints = RunCheckpoints(
            Checkpoints(folder),
            self.stream,
            {"progress": self.progress},
            self.write,
            every=every,
            config={"rate": 0.1} | config,
            run_id=run_id,
            say=self.said.append,
        )

    def write(self, folder: Path) -> None:
        if self.fault is not None:
            raise self.fault
        self.written.append(folder.name)

    def train(self, until: int, best: Callable[[int], bool] = lambda _: False) -> "Box":
        """Up to and including this step, 10 tokens each."""
        for step in self.stream:
            self.progress.tokens += 10
            self.checkpoints.save_when_due(best(step))
            if step == until:
                break
        return self


def names(box: Box) -> list[str]:
    return sorted(path.name for path in box.checkpoints.store.folder.glob("step_*"))


def test_checkpoints_are_written_when_due_of_the_best_step_and_once(tmp_path: Path) -> None:
    box = Box(tmp_path, every=2).train(5, best=lambda step: step == 3)
    assert names(box) == ["step_2", "step_3", "step_4"]
    assert (tmp_path / "best").read_text() == "step_3\n"
    box.checkpoints.save()
    box.checkpoints.save()
    assert box.written == [".step_2.partial", ".step_3.partial", ".step_4.partial", ".step_5.partial"]


def test_without_a_number_of_steps_only_the_best_and_the_last_are_written(tmp_path: Path) -> None:
    box = Box(tmp_path).train(5, best=lambda step: step == 1)
    assert box.checkpoints.metrics == {}
    box.checkpoints.save()
    assert names(box) == ["step_1", "step_5"]


def test_a_checkpoint_that_fails_is_said_and_counted_and_the_last_one_must_not(tmp_path: Path) -> None:
    box = Box(tmp_path, every=1).train(1)
    assert box.checkpoints.metrics["checkpoint/failed"] == 0
    box.fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    box.train(3)
    assert box.checkpoints.metrics["checkpoint/failed"] == 2
    assert box.checkpoints.metrics["timing_s/checkpoint"] >= 0
    first, _ = box.said
    assert first.startswith("warning: checkpoint of step 2 could not be written")
    assert first.endswith("; the training goes on")
    with pytest.raises(CheckpointError, match="checkpoint of step 3 could not be written"):
        box.checkpoints.save()
    assert names(box) == ["step_1"]


def test_a_run_goes_on_where_it_was_and_says_what_is_other_than_before(tmp_path: Path) -> None:
    before = Box(tmp_path, every=2)
    before.checkpoints.parts["tracker"] = Progress(tokens=7)  # made after loading
    before.train(2)
    box = Box(tmp_path, rate=0.2)
    found = box.checkpoints.load("auto")
    assert found is not None
    folder, state = found
    assert (folder, state["tracker"]["tokens"]) == (tmp_path / "step_2", 7)
    assert (box.stream.step, box.progress.tokens) == (2, 20)
    assert box.said == [
        f"goes on after step 2 of 5, from {tmp_path}/step_2",
        "changed since that checkpoint: rate: 0.1 -> 0.2",
    ]
    box.checkpoints.save()  # it is there
    assert box.written == []


def test_the_steps_of_a_run_may_follow_from_what_is_left_of_its_data(tmp_path: Path) -> None:
    Box(tmp_path, every=2).train(2)
    box = Box(tmp_path)
    # Counted once the parts are set: 20 tokens were trained on, and 50 are left.
    box.checkpoints.load("auto", lambda: (70 - box.progress.tokens) // 10)
    assert box.stream.steps == 7
    assert box.said == [f"goes on after step 2 of 7, from {tmp_path}/step_2"]


def test_what_another_run_has_saved_is_saved_again_in_the_folder_of_this_one(tmp_path: Path) -> None:
    Box(tmp_path / "one", every=2).train(2)
    box = Box(tmp_path / "two")
    box.checkpoints.load(str(tmp_path / "one"))
    assert box.stream.step == 2
    box.checkpoints.save()
    assert names(box) == ["step_2"]


def test_a_run_that_is_started_again_goes_on_even_where_it_was_to_begin_anew(tmp_path: Path) -> None:
    Box(tmp_path, every=2, run_id="mine").train(2)
    assert Box(tmp_path, run_id="other").checkpoints.load("none") is None
    assert Box(tmp_path, run_id="mine").checkpoints.load("none") is not None
    assert Box(tmp_path / "empty").checkpoints.load("auto") is None


def test_a_checkpoint_of_another_recipe_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(4, {"stream": {"step": 4}, "config": {}}, lambda folder: None)
    with pytest.raises(ValueError, match="step_4 holds no state of progress: another recipe or version wrote it"):
        Box(tmp_path).checkpoints.load("auto")
