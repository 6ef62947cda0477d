"""Processes on the same GPU change its memory one at a time."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.queues import SimpleQueue

import pytest

from components.models.gpu_lock import gpu_memory_locked
from plugins.sleep.host_memory import HostCopies
from tests.components.helpers.ranks import FORKS

HELD_S = 0.5


def hold(gpus: str, ready: threading.Event, ends: list[float]) -> None:
    """Hold the lock of some GPUs for a while, and record when it is released."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        lock = gpu_memory_locked()
        lock.__enter__()
    ready.set()
    time.sleep(HELD_S)
    ends.append(time.monotonic())
    lock.__exit__(None, None, None)


@pytest.mark.parametrize(("gpus", "waits"), [("3", True), ("4,3", True), ("1", False), ("", False)])
def test_a_trainer_moves_its_state_only_while_no_engine_on_its_gpu_measures_memory(
    monkeypatch: pytest.MonkeyPatch, gpus: str, waits: bool
) -> None:
    ready = threading.Event()
    ends: list[float] = []
    engine = threading.Thread(target=hold, args=("2,3", ready, ends))
    engine.start()
    ready.wait()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    HostCopies([], device_type="cpu")
    slept = time.monotonic()
    engine.join()
    assert (slept > ends[0]) == waits


def hold_forever(gpus: str, ready: SimpleQueue[str]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    with gpu_memory_locked():
        ready.put("locked")
        threading.Event().wait()


def test_the_lock_of_a_killed_process_is_free_and_a_lock_that_is_never_released_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    ready = FORKS.SimpleQueue()
    process = FORKS.Process(target=hold_forever, args=("5", ready), daemon=True)
    process.start()
    assert ready.get() == "locked"
    with gpu_memory_locked(within_s=0.2):
        assert "GPU 5 for more than 0.2 s" in caplog.text
    process.kill()
    process.join()
    caplog.clear()
    with gpu_memory_locked():
        assert not caplog.text


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_process_without_gpus_locks_nothing(
    hidden: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with gpu_memory_locked(), gpu_memory_locked(within_s=0.1):
        assert not caplog.text
