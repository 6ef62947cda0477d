"""The table of GPUs, and the cached file."""

from pathlib import Path

import pytest

from plugins.machine_speed.layers import DECODE, EngineSpeed, Passes, Point
from plugins.machine_speed.speed import MachineSpeed, cached_speed, device_name, speed_file, table_speed, write_speed

SPEED = MachineSpeed(
    device=device_name(0),
    source="measured",
    products={"1": {"float32": 1e11}, "8": {"float32": 6e11, "bfloat16": 9e11}},
    memory={"1": {"1000": 6e10, "1000000": 1e10}},
    disk=1e9,
    engines={
        "1": EngineSpeed(
            passes={DECODE: Passes(points=[Point(parameters=9, tokens=8, layer_s=0.1, rest_s=0.2)], logit_s=1e-9)}
        )
    },
)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
    ],
)
def test_table_knows_the_peak_of_a_gpu_by_the_name_of_its_driver(name: str, peak: float) -> None:
    speed = table_speed(name)
    assert speed is not None
    assert speed.peak("bfloat16", 4) == peak
    assert speed.source == "table"


def test_unknown_gpu_has_no_speed() -> None:
    assert table_speed("NVIDIA L400") is None


def test_cached_speed_is_the_one_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path))
    assert cached_speed(gpus=0) is None
    assert write_speed(SPEED) == speed_file(SPEED.device)
    assert cached_speed(gpus=0) == SPEED


def test_file_of_another_version_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path))
    path = write_speed(SPEED)
    path.write_text(path.read_text().replace('"version": 1', '"version": 0'))
    assert cached_speed(gpus=0) is None


def test_rates_are_those_of_the_nearest_threads_and_of_the_working_set() -> None:
    assert SPEED.peak("bfloat16", 6) == 9e11
    assert SPEED.peak("float32", 2) == 1e11
    assert SPEED.bandwidth(500, 1) == 6e10
    assert SPEED.bandwidth(1e12, 1) == 1e10
    assert SPEED.passes(DECODE, 2) is not None
    assert SPEED.passes("forward", 2) is None
