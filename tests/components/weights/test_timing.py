"""Times of the parts of a weight sync."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from components.weights.carrier import CarrierSetting, FolderCarrier
from components.weights.timing import SyncTimer
from training.remote_call import sync_metrics


def slowly_gathered(count: int, seconds: float) -> Iterator[tuple[str, Tensor]]:
    for number in range(count):
        time.sleep(seconds)
        yield f"{number}", torch.full((4,), float(number))


def test_the_timer_measures_the_iterator_and_not_its_consumer() -> None:
    timer = SyncTimer()
    began = time.monotonic()
    for _ in timer.waiting("gather", slowly_gathered(3, 0.02)):
        time.sleep(0.1)
    elapsed = time.monotonic() - began
    assert list(timer.waiting("gather", [])) == []
    assert 0.06 <= timer.seconds["gather"] <= elapsed - 0.3


def test_parts_of_a_publication_add_up_to_its_duration_and_are_logged(tmp_path: Path) -> None:
    setting = CarrierSetting(
        rank=0,
        device=torch.device("cpu"),
        shared_dir=tmp_path,
        fallback_dir=tmp_path / "disk",
        readers=1,
        serve=False,
    )
    carrier = FolderCarrier(setting)
    began = time.monotonic()
    handle = carrier.publish(1, slowly_gathered(4, 0.02), with_digests=True, adapter_scale=0.0)
    took = time.monotonic() - began
    carrier.close()
    assert handle is not None
    assert set(handle.seconds) == {"gather", "digest", "send"}
    assert handle.seconds["gather"] >= 0.08
    assert sum(handle.seconds.values()) <= took
    engines = [
        {"gpu_memory_gb": 1.0, "timing_s/sync_wake": 0.5, "timing_s/generate_decode": 6.0},
        {"gpu_memory_gb": 2.0, "timing_s/sync_wake": 0.25, "timing_s/generate_decode": 5.0},
    ]
    metrics = sync_metrics(handle, engines)
    times = {f"timing_s/sync_{part}": seconds for part, seconds in handle.seconds.items()}
    times |= {"timing_s/sync_wake": 0.5, "timing_s/generate_decode": 6.0}
    assert metrics == times | {"rollout/gpu_memory_gb": 2.0}
