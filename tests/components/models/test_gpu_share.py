"""An engine waits for others to free the memory of its GPUs, and takes what is free."""

import logging
import os
import re
from pathlib import Path

import pytest

from components.models.gpu_share import free_share, gpu_memory, memory_of
from components.train.memory_sizes import CONTEXT_BYTES
from tests.messages import says

GB = 10**9


class Readings:
    """Free memory of two GPUs of 80 GB at successive readings. The last reading repeats."""

    def __init__(self, *free_gb: tuple[int, int]) -> None:
        self.free_gb = list(free_gb)

    def __call__(self) -> list[tuple[int, int]]:
        both = self.free_gb[0] if len(self.free_gb) == 1 else self.free_gb.pop(0)
        return [(free * GB + CONTEXT_BYTES, 80 * GB) for free in both]


def test_an_engine_waits_until_all_of_its_gpus_have_its_share_free(caplog: pytest.LogCaptureFixture) -> None:
    # 0.45 of 80 GB is 36 GB.
    readings = Readings((80, 20), (80, 35), (40, 36))
    with caplog.at_level(logging.WARNING):
        assert free_share(0.45, readings, within_s=60.0, every_s=0.0) == 0.45
    assert readings.free_gb == [(40, 36)]
    (line,) = caplog.messages
    assert re.search(says("0.45", "0.25 are free", "60 s"), line)


def test_an_engine_whose_wait_for_memory_times_out_uses_the_free_memory_and_logs_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        # 27 of 80 GB is 0.3375, which is rounded down.
        assert free_share(0.45, Readings((80, 27)), within_s=0.0) == 0.33
    assert re.search(says("0.33", "0.45"), caplog.messages[-1])


@pytest.mark.parametrize("readings", [list, Readings((0, 80))], ids=["not known", "nothing is free"])
def test_an_engine_requests_its_full_share_if_vllm_gives_the_better_error(readings: Readings) -> None:
    assert free_share(0.9, readings, within_s=0.0) == 0.9


SHOWN = "0, GPU-1a2b, 1024, 81559\n1, GPU-3c4d, 0, 81559\n10, GPU-5e6f, 512, 81559\n2, MIG-7a8b, [N/A], [N/A]\n\n"


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        (None, [1024, 0, 512]),
        ("10,0", [512, 1024]),
        ("1", [0]),
        ("GPU-5e, GPU-1a2b", [512, 1024]),
        ("2,", []),
        ("", []),
    ],
)
def test_the_memory_of_gpus_is_read_in_the_order_of_cuda_visible_devices(visible: str | None, free: list[int]) -> None:
    assert memory_of(SHOWN, visible) == [(mib * 2**20, 81559 * 2**20) for mib in free]


def test_reading_the_memory_of_gpus_creates_no_cuda_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf %s '{SHOWN}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "10,0,1")
    assert gpu_memory(2) == [(512 * 2**20, 81559 * 2**20), (1024 * 2**20, 81559 * 2**20)]
