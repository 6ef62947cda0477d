"""Rollouts that are written while the next step runs."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from components.batch import Batch
from components.batch.reading import load_batch
from plugins.rollout_writer.tracker import MOST_WAITING, BackgroundTracker

BATCH = Batch([2, 1], {"tokens": torch.tensor([1, 2, 3])}, {"reward": torch.tensor([0.5, 1.0])})


class Slow(Batch):
    """A batch whose file is written once the test allows it."""

    allowed = threading.Event()

    def save(self, path: str | Path) -> None:
        """See `Batch.save`."""
        assert self.allowed.wait(20)
        super().save(path)


@pytest.fixture
def slow() -> Iterator[Slow]:
    Slow.allowed.clear()
    yield Slow([2, 1], {"tokens": torch.tensor([1, 2, 3])})
    Slow.allowed.set()


@pytest.fixture
def tracker(tmp_path: Path) -> BackgroundTracker:
    return BackgroundTracker(tmp_path / "run", "toy", {}, seed=3)


def files(tracker: BackgroundTracker) -> list[str]:
    return sorted(path.name for path in (tracker.run_dir / "rollouts").glob("*.parquet"))


def test_a_step_does_not_wait_for_its_file_and_a_checkpoint_does(tracker: BackgroundTracker, slow: Slow) -> None:
    for step in range(1, MOST_WAITING + 1):
        tracker.rollouts(step, slow)
    assert files(tracker) == []
    saving = threading.Thread(target=tracker.state_dict)  # a checkpoint
    saving.start()
    saving.join(0.1)
    assert saving.is_alive()
    slow.allowed.set()
    saving.join(20)
    assert not saving.is_alive()
    assert files(tracker) == ["step_000001.parquet", "step_000002.parquet"]
    assert load_batch(tracker.run_dir / "rollouts/step_000002.parquet")["tokens"].tolist() == [1, 2, 3]
    tracker.close()


def test_the_number_of_waiting_batches_is_bounded(tracker: BackgroundTracker, slow: Slow) -> None:
    for step in range(1, MOST_WAITING + 1):
        tracker.rollouts(step, slow)
    adding = threading.Thread(target=tracker.rollouts, args=(9, slow))
    adding.start()
    adding.join(0.1)
    assert adding.is_alive()
    slow.allowed.set()
    adding.join(20)
    tracker.close()
    assert len(files(tracker)) == MOST_WAITING + 1


def test_close_completes_the_files_and_an_error_is_logged_with_its_reason(
    tracker: BackgroundTracker, caplog: pytest.LogCaptureFixture
) -> None:
    tracker.rollouts(1, BATCH)
    (tracker.run_dir / "failed").write_text("a file instead of a folder")
    tracker.rollouts(2, BATCH, "failed/step_{step:06d}.parquet")
    with caplog.at_level(logging.WARNING):
        tracker.close()
    assert files(tracker) == ["step_000001.parquet"]
    assert "rollouts of" in caplog.text
    assert "failed" in caplog.text
