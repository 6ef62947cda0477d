"""Durations of phases, and checkpoints: when they are due, the best one, failures, and resuming."""

import errno
import json
import math
import os
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import training.run.phase_clock
from components.batch import Batch
from tests.messages import says
from training.run.checkpoint import CheckpointError, Checkpoints
from training.run.phase_clock import PhaseClock
from training.run.policy_checkpoints import PolicyCheckpoints
from training.run.progress import Progress
from training.run.queue import open_queue


class FakeTime:
    """A substitute for `time` whose clock advances only when a test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: 0.0)
        monkeypatch.setattr(training.run.phase_clock, "time", clock)

    def pass_in(self, context: AbstractContextManager[None], seconds: float) -> None:
        with context:
            self.now += seconds


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return FakeTime(monkeypatch)


def test_the_phases_of_a_step_add_up_to_its_duration(fake_time: FakeTime) -> None:
    clock = PhaseClock()
    fake_time.now += 60  # time before the first step
    clock.begin()
    for name, seconds in (("generate", 1.0), ("train", 3.5), ("generate", 0.25)):
        fake_time.pass_in(clock.phase(name), seconds)
    fake_time.now += 0.75
    expected = {"generate": 1.25, "train": 3.5, "other": 0.75, "step": 5.5}
    assert clock.take() == {f"timing_s/{name}": seconds for name, seconds in expected.items()}
    # A phase that ends with an error is counted, and the time before it belongs to the same step.
    fake_time.now += 2.0
    with pytest.raises(KeyError), clock.phase("train"):
        fake_time.now += 1.0
        raise KeyError
    assert clock.take() == {"timing_s/train": 1.0, "timing_s/other": 2.0, "timing_s/step": 3.0}
    assert clock.take() == {"timing_s/other": 0.0, "timing_s/step": 0.0}


def test_a_clock_without_start_begins_at_its_first_phase(fake_time: FakeTime) -> None:
    clock = PhaseClock()
    fake_time.now += 60
    fake_time.pass_in(clock.phase("train"), 2.0)
    assert clock.take() == {"timing_s/train": 2.0, "timing_s/other": 0.0, "timing_s/step": 2.0}


def test_time_outside_of_steps_is_reported_separately(fake_time: FakeTime) -> None:
    events: list[Any] = []
    clock = PhaseClock(events.append)
    clock.begin()

    def evaluate(seconds: float) -> float:
        fake_time.pass_in(clock.phase("generate"), seconds)
        return seconds

    assert clock.outside_step("evaluate", evaluate)(100.0) == 100.0
    with pytest.raises(KeyError), clock.beside_step("checkpoint"):
        fake_time.now += 50.0
        raise KeyError
    fake_time.pass_in(clock.phase("train"), 2.0)
    assert clock.take() == {"timing_s/train": 2.0, "timing_s/other": 0.0, "timing_s/step": 2.0}
    ended = [(event.phase, event.seconds) for event in events if event.seconds is not None]
    assert ended == [("evaluate", 100.0), ("checkpoint", 50.0), ("train", 2.0)]


def test_phases_of_another_thread_are_shown_but_not_summed(fake_time: FakeTime) -> None:
    clock = PhaseClock()
    handed_over: list[dict[str, float]] = []
    clock.begin()

    def generate() -> None:
        fake_time.pass_in(clock.phase("generate"), 4.0)
        handed_over.append(clock.take_phases())

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()
    clock.take()
    clock.add(handed_over[0])
    for name, seconds in (("wait", 3.5), ("reward", 0.5), ("train", 2.0)):
        fake_time.pass_in(clock.phase(name), seconds)
    expected = {"wait": 3.5, "reward": 0.5, "train": 2.0, "generate": 4.0, "other": 0.0, "step": 6.0}
    assert clock.take() == {f"timing_s/{name}": seconds for name, seconds in expected.items()}


def test_a_step_is_counted_and_its_throughput_is_logged() -> None:
    # 3 sequences of 12 tokens in 4 s, while another thread generated for 5 s.
    progress, batch = Progress(tokens=8, seconds=1.0), Batch([3, 4, 5], {"tokens": torch.arange(12)})
    took = {"timing_s/generate": 5.0, "timing_s/train": 3.0, "timing_s/step": 4.0}
    assert progress.count(took, batch, 2_500_000_000) == took | {
        "perf/tokens_per_second": 3.0,
        "perf/samples_per_second": 0.75,
        "perf/generate_share": 1.25,
        "perf/train_share": 0.75,
        "perf/memory_gb": 2.5,
    }
    assert (progress.tokens, progress.seconds) == (20, 5.0)
    # The memory has not been measured yet, and the clock may not have advanced.
    counted = progress.count({"timing_s/step": 0.0}, batch)
    assert sorted(counted) == ["perf/samples_per_second", "perf/tokens_per_second", "timing_s/step"]


def test_asynchronous_generation_has_separate_phases_of_both_threads() -> None:
    clock, seen = PhaseClock(), []

    def generate(step: int) -> int:
        with clock.phase("generate"):
            return step

    for _ in open_queue(generate, 2, 1, clock=clock):
        with clock.phase("train"):
            pass
        times = clock.take()
        seen.append(sorted(times))
        phases = times["timing_s/wait"] + times["timing_s/train"] + times["timing_s/other"]
        assert times["timing_s/step"] == pytest.approx(phases)
    names = ["timing_s/generate", "timing_s/other", "timing_s/step", "timing_s/train", "timing_s/wait"]
    assert seen == [names] * 2


class Box:
    """A run of some steps that counts tokens and writes its checkpoints to a folder."""

    def __init__(self, folder: Path, *, every: int = -1, steps: int = 5, run_id: str = "a", **config: Any) -> None:
        self.said: list[str] = []
        self.written: list[str] = []
        self.fault: OSError | None = None
        self.stream = open_queue(lambda step: step, steps)
        self.progress = Progress()
        self.checkpoints = PolicyCheckpoints(
            store=Checkpoints(folder),
            stream=self.stream,
            parts={"progress": self.progress},
            write=self.write,
            every=every,
            config={"rate": 0.1} | config,
            run_id=run_id,
            info=self.said.append,
        )

    def write(self, folder: Path) -> None:
        if self.fault is not None:
            raise self.fault
        self.written.append(folder.name)

    def train(self, until: int, best: Callable[[int], bool] = lambda _: False) -> "Box":
        """Train up to and including this step, with 10 tokens per step."""
        for step in self.stream:
            self.progress.tokens += 10
            self.checkpoints.save_when_due(best(step))
            if step == until:
                break
        return self


def names(box: Box) -> list[str]:
    return sorted(path.name for path in box.checkpoints.store.folder.glob("step_*"))


def test_checkpoints_are_written_once_when_due_and_for_the_best_step(tmp_path: Path) -> None:
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


def test_a_failed_checkpoint_is_reported_and_counted_and_the_last_one_raises(tmp_path: Path) -> None:
    box = Box(tmp_path, every=1).train(1)
    assert box.checkpoints.metrics["perf/checkpoints_failed"] == 0
    box.fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    box.train(3)
    assert box.checkpoints.metrics["perf/checkpoints_failed"] == 2
    assert box.checkpoints.metrics["timing_s/checkpoint"] >= 0
    for step, said in zip((2, 3), box.said, strict=True):
        assert re.search(says(f"step {step}", tmp_path, "No space left on device"), said)
    with pytest.raises(CheckpointError, match=says("step 3", tmp_path, "No space left on device")):
        box.checkpoints.save()
    assert names(box) == ["step_1"]


def test_a_resumed_run_continues_at_its_step_and_lists_changed_options(tmp_path: Path) -> None:
    before = Box(tmp_path, every=2)
    before.checkpoints.parts["tracker"] = Progress(tokens=7)  # created after loading
    before.train(2)
    box = Box(tmp_path, rate=0.2)
    checkpoint = box.checkpoints.load("auto")
    assert checkpoint is not None
    folder, state = checkpoint
    assert (folder, state["tracker"]["tokens"]) == (tmp_path / "step_2", 7)
    assert (box.stream.step, box.progress.tokens) == (2, 20)
    resumed, changed = box.said
    assert re.search(says("step 2 of 5", tmp_path / "step_2"), resumed)
    assert "rate: 0.1 -> 0.2" in changed
    box.checkpoints.save()  # it exists
    assert box.written == []


def test_the_number_of_steps_may_follow_from_the_remaining_data(tmp_path: Path) -> None:
    Box(tmp_path, every=2).train(2)
    box = Box(tmp_path)
    # Counted after the parts are set: 20 tokens were trained on, and 50 are left.
    box.checkpoints.load("auto", lambda: (70 - box.progress.tokens) // 10)
    assert box.stream.steps == 7
    (said,) = box.said
    assert re.search(says("step 2 of 7", tmp_path / "step_2"), said)


def test_a_step_resumed_from_another_run_is_saved_again_in_this_folder(tmp_path: Path) -> None:
    Box(tmp_path / "one", every=2).train(2)
    box = Box(tmp_path / "two")
    box.checkpoints.load(str(tmp_path / "one"))
    assert box.stream.step == 2
    box.checkpoints.save()
    assert names(box) == ["step_2"]


def test_a_restarted_run_resumes_even_with_resume_none(tmp_path: Path) -> None:
    Box(tmp_path, every=2, run_id="mine").train(2)
    assert Box(tmp_path, run_id="other").checkpoints.load("none") is None
    assert Box(tmp_path, run_id="mine").checkpoints.load("none") is not None
    assert Box(tmp_path / "empty").checkpoints.load("auto") is None


def test_a_checkpoint_of_another_recipe_is_refused_with_its_missing_parts(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(4, {"stream": {"step": 4}, "config": {}}, lambda folder: None)
    with pytest.raises(ValueError, match=says(tmp_path / "step_4", "progress", "resume=none", "run_dir")):
        Box(tmp_path).checkpoints.load("auto")


# --- ahead


class Counter:
    """Returns the prompts 0, 1, 2, ..."""

    label: Any = None
    """Label of every row. None gives each row a different label."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> Batch:
        self.taken += count
        ids = list(range(self.taken - count, self.taken))
        columns = {"prompt_id": ids, "weight": torch.tensor(ids) / 3}
        labels = [self.label or {"number": i} for i in ids]
        return Batch.from_rows({"tokens": [[i] * (i + 1) for i in ids]}, columns, {"label": labels})

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Ahead:
    """A run of 5 steps of two prompts with a queue of two batches. The generation of step `halt` waits in its
    middle.
    """

    def __init__(self, folder: Path, halt: int = 0, **sources: Any) -> None:
        self.prompts, self.begun, self.go_on = Counter(), threading.Event(), threading.Event()
        self.halt = halt
        all_sources = {"prompts": self.prompts, **sources}
        self.stream = open_queue(self.generate, 5, 2, sources=all_sources, metrics=lambda: {"nan": math.nan})
        self.said: list[str] = []
        self.checkpoints = PolicyCheckpoints(
            store=Checkpoints(folder),
            stream=self.stream,
            parts={},
            write=lambda folder: None,
            every=1,
            config={},
            run_id="",
            info=self.said.append,
        )

    def generate(self, step: int) -> Batch:
        batch = self.prompts.take(2)
        if step == self.halt:
            self.begun.set()
            assert self.go_on.wait(300)
        return batch

    def train(self, until: int) -> list[Batch]:
        """Train up to this step, whose checkpoint is written while the batch of `halt` is being generated."""
        seen = []
        for batch in self.stream:
            seen.append(batch)
            if self.stream.step == until:
                assert not self.halt or self.begun.wait(300)
                self.checkpoints.save_when_due()
                self.go_on.set()
                break
        return seen


def test_a_checkpoint_holds_queued_batches_and_resume_regenerates_the_unfinished_one(
    tmp_path: Path,
) -> None:
    before = Ahead(tmp_path, halt=4).train(2)
    state = json.loads((tmp_path / "step_2" / "state" / "trainer.json").read_text())
    assert state["prompts"] == {"taken": 6}
    assert state["stream"]["queue"][0]["batch"] == {"__batch__": "batch-stream-queue-0-batch.parquet"}
    resumed = Ahead(tmp_path)
    # 4 of 10 prompts were not yet used, and one of the remaining steps is in the queue.
    checkpoint = resumed.checkpoints.load("auto", lambda: (10 - resumed.prompts.taken) // 2)
    assert checkpoint is not None
    assert (resumed.stream.step, resumed.stream.queued, resumed.stream.steps) == (2, 1, 5)
    (said,) = resumed.said
    assert re.search(says("step 2 of 5", tmp_path / "step_2"), said)
    after = resumed.train(5)
    assert [batch["prompt_id"].tolist() for batch in before + after] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    made = Counter()
    made.taken = 4
    assert after[0].to_table().equals(made.take(2).to_table())
    assert math.isnan(resumed.stream.metrics["nan"])


def test_without_a_queue_a_checkpoint_has_no_batches(tmp_path: Path) -> None:
    Box(tmp_path, every=2).train(2)
    assert json.loads((tmp_path / "step_2" / "state" / "trainer.json").read_text()) == {
        "stream": {"step": 2},
        "progress": {"version": 0, "tokens": 20, "seconds": 0.0},
        "run_id": "a",
        "config": {"rate": 0.1},
    }
    assert [path.name for path in (tmp_path / "step_2" / "state").glob("t*")] == ["trainer.json"]


def test_a_queue_with_objects_that_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    run = Ahead(tmp_path, halt=3)
    run.prompts.label = (1, 2)
    with pytest.raises(ValueError, match="'label'"):
        run.train(1)
    run.go_on.set()
    assert not list(tmp_path.glob("step_*"))


class Held:
    """Return the prompts in flight as one batch."""

    def __init__(self, prompts: Batch | None = None) -> None:
        self.prompts = prompts

    def state_dict(self) -> dict[str, Any]:
        return {} if self.prompts is None else {"prompts": self.prompts, "steps": [1] * len(self.prompts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prompts = state.get("prompts")


def test_a_checkpoint_holds_prompts_in_flight_and_a_run_without_partial_rollouts_refuses_it(tmp_path: Path) -> None:
    Ahead(tmp_path, groups=Held(Counter().take(3))).train(1)
    resumed = Ahead(tmp_path, groups=(held := Held()))
    resumed.checkpoints.load("auto")
    assert held.prompts is not None
    assert held.prompts["label"] == [{"number": 0}, {"number": 1}, {"number": 2}]
    with pytest.raises(ValueError, match=says(tmp_path / "step_1", "3 prompts", "asynchronous.partial_rollout")):
        Ahead(tmp_path).checkpoints.load("auto")


def test_a_resumed_run_may_enable_partial_rollouts(tmp_path: Path) -> None:
    Ahead(tmp_path).train(1)
    resumed = Ahead(tmp_path, groups=(held := Held(Counter().take(1))))
    resumed.checkpoints.load("auto")
    assert held.prompts is None
    Ahead(tmp_path / "two", groups=Held()).train(1)
    assert Ahead(tmp_path / "two").checkpoints.load("auto") is not None


def put_back(box: Box, at: int) -> Box:
    """Train up to this step, whose batch is returned to the queue, as after failed rewards."""
    for step in box.stream:
        if step == at:
            box.stream.put_back()
            box.checkpoints.save_unfinished()
            return box
        box.progress.tokens += 10
        box.checkpoints.save_when_due()
    raise AssertionError(f"there is no step {at}")


@pytest.mark.parametrize("every", [-1, 3])
def test_a_run_with_failed_rewards_resumes_with_the_unrewarded_batch(tmp_path: Path, every: int) -> None:
    box = put_back(Box(tmp_path, every=every), at=4)
    assert names(box) == ["step_3"]
    (said,) = box.said
    assert re.search(says("step 3", "generated ahead (1)"), said)
    # The checkpoint that was due at step 3 did not contain the batch yet.
    assert box.written == [".step_3.partial"] * (1 if every == -1 else 2)
    resumed = Box(tmp_path)
    resumed.checkpoints.load("auto")
    assert (resumed.stream.step, resumed.stream.queued, resumed.progress.tokens) == (3, 1, 30)
    assert list(resumed.stream) == [4, 5]


def test_failed_rewards_save_no_checkpoint_that_exists_or_has_no_training(tmp_path: Path) -> None:
    box = Box(tmp_path, every=1).train(2)
    box.checkpoints.save_unfinished()
    assert box.written == [".step_1.partial", ".step_2.partial"]
    box = put_back(Box(tmp_path / "new"), at=1)
    assert (names(box), box.said) == ([], [])


def test_a_failed_checkpoint_does_not_hide_the_error_that_ended_the_run(tmp_path: Path) -> None:
    box = Box(tmp_path).train(1)
    box.fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    put_back(box, at=3)
    (said,) = box.said
    assert re.search(says("step 2", tmp_path, "No space left on device"), said)


def test_a_failed_evaluation_is_repeated_before_a_resumed_run_continues(tmp_path: Path) -> None:
    trained, logged = Batch.from_rows({"tokens": [[1], [2, 3]]}, {"reward": torch.tensor([0.1, 0.2])}), {"loss": 0.3}

    def no_rewards(batch: Batch, metrics: dict[str, float]) -> bool:
        raise ConnectionError

    box = Box(tmp_path).train(2)
    with pytest.raises(ConnectionError):
        box.checkpoints.record(no_rewards, trained, logged)
    box.checkpoints.save_unfinished()
    (said,) = box.said
    assert re.search(says("step 2", "not evaluated"), said)
    resumed, seen = Box(tmp_path), list[Any]()
    resumed.checkpoints.load("auto")
    resumed.checkpoints.log_unlogged_step(lambda batch, metrics: bool(seen.append((batch, metrics))) or True)
    ((batch, metrics),) = seen
    assert batch.to_table().equals(trained.to_table())
    assert metrics == {"loss": 0.3}
    # The checkpoint of the best step does not contain it, and nothing is evaluated twice.
    assert (tmp_path / "best").read_text() == "step_2\n"
    assert resumed.written == [".step_2.partial"]
    again = Box(tmp_path)
    again.checkpoints.load("auto")
    again.checkpoints.log_unlogged_step(no_rewards)
    assert list(again.stream) == [3, 4, 5]
