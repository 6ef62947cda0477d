"""Speed of a machine: the numbers, the table of GPUs by name, and the cached file. Nothing here imports torch."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from components.net.hub import cache_root
from core.placement import detect_devices
from plugins.machine_speed.layers import EngineSpeed, Passes
from training.tracking.serialization import json_object, write_whole

COMMAND = "python scripts/measure_machine.py"
_SMI = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
VERSION = 1
"""Version of the cached file. A file of another version is not read."""

GPUS = {
    "B200": (2250e12, 8.0e12, 900e9),
    "H200": (989e12, 4.8e12, 450e9),
    "H100 PCIe": (756e12, 2.0e12, 300e9),
    "H100": (989e12, 3.35e12, 450e9),
    "A100": (312e12, 2.039e12, 300e9),
    "L40S": (362e12, 0.864e12, 32e9),
    "L4": (121e12, 0.3e12, 32e9),
    "A10": (125e12, 0.6e12, 32e9),
    "RTX 4090": (165e12, 1.008e12, 32e9),
}
"""Dense bfloat16 operations per second, bytes of memory per second, and bytes per second to other GPUs of the machine
in one direction. Source: the manufacturer's data sheets, of the 80 GB SXM variant where there are several. Where a
sheet lists operations with sparsity, half of them. The first key that the device's name contains applies."""
HOST_COPY, DISK = 20e9, 1e9
"""Assumed bytes per second of copies and of the disk of a GPU's host, where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class MachineSpeed:
    """Peak speeds of one device and its host. A rate of 0 is not known."""

    device: str
    """Name of the processor or GPU."""
    source: str
    """`measured` or `table`."""
    products: dict[str, dict[str, float]]
    """Operations per second of large matrix products, by number of threads ("0" on a GPU) and dtype."""
    memory: dict[str, dict[str, float]]
    """Bytes per second of reading memory, by number of threads and size of the working set in bytes."""
    host_copy: float = 0.0
    """Bytes per second of a copy in host memory."""
    disk: float = 0.0
    """Bytes per second of a write to the disk that holds the cache folder."""
    network: float = 0.0
    """Bytes per second between two processes of this machine, or between its GPUs."""
    engines: dict[str, EngineSpeed] = field(default_factory=dict)
    """Seconds of small models in the engines, by number of threads. Empty if they were not measured."""

    def peak(self, precision: str, threads: int) -> float:
        """Return the operations per second of large products in a dtype with this number of threads."""
        rates = self.products[_nearest(self.products, threads)]
        return rates.get(precision) or max(rates.values())

    def bandwidth(self, working_set: float, threads: int) -> float:
        """Return the bytes per second of reading a working set repeatedly, which may fit into a cache."""
        rates = self.memory[_nearest(self.memory, threads)]
        sizes = sorted(map(int, rates))
        return rates[str(next((size for size in sizes if size >= working_set), sizes[-1]))]

    def passes(self, kind: str, threads: int) -> Passes | None:
        """Return the measured passes of a kind: `forward`, `train` or `decode`."""
        if not self.engines:
            return None
        return self.engines[_nearest(self.engines, threads)].passes.get(kind)


def _nearest(by_threads: dict[str, Any], threads: int) -> str:
    """Return the measured number of threads that is nearest to the given one."""
    return min(by_threads, key=lambda name: abs(int(name) - threads))


def cached_speed(gpus: int | None = None) -> MachineSpeed | None:
    """Return the measured speed of this machine, or the one of its GPU in the table. None if neither is known.

    Args:
        gpus: number of GPUs of the job. Default: those of this machine.
    """
    if gpus is None:
        gpus = detect_devices()
    name = device_name(gpus)
    values = json_object(speed_file(name))
    if values.get("version") == VERSION:
        engines = {threads: EngineSpeed.from_json(speed) for threads, speed in values["engines"].items()}
        return MachineSpeed(**{**values["speed"], "engines": engines})
    if not gpus:
        return None
    return table_speed(name)


def table_speed(name: str) -> MachineSpeed | None:
    """Return the speed of a GPU by the name that its driver reports, or None if the table lacks it."""
    rates = next((rates for key, rates in GPUS.items() if re.search(rf"{key}\b", name)), None)
    if rates is None:
        return None
    products, memory, network = rates
    # TF32 on tensor cores has half the rate of bfloat16.
    rate_of = {"bfloat16": products, "float32": products / 2}
    return MachineSpeed(
        device=name,
        source="table",
        products={"0": rate_of},
        memory={"0": {str(2**40): memory}},
        host_copy=HOST_COPY,
        disk=DISK,
        network=network,
    )


def write_speed(speed: MachineSpeed) -> Path:
    """Write the speed of this machine to the cache folder, and return the path of the file."""
    values = asdict(speed)
    content = {"version": VERSION, "engines": values.pop("engines"), "speed": values}
    path = speed_file(speed.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")
    return path


def speed_file(name: str) -> Path:
    """Return the path of the cached speed of a device."""
    # Machines that share a home folder may differ in cores but not in the name of their processor.
    key = re.sub(r"[^A-Za-z0-9]+", "_", f"{name}_{os.cpu_count()}")
    return cache_root() / "machine_speed" / f"{key}.json"


def device_name(gpus: int) -> str:
    """Return the name of the GPUs of this machine, or of its processor."""
    if gpus:
        try:
            done = subprocess.run(_SMI, capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return "GPU"
        return done.stdout.partition("\n")[0].strip()
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    if match:
        return match[1]
    return platform.processor() or platform.machine()
