"""How fast weights get from one process into the tensors of another, beside a plain copy of the same bytes.

    OMP_NUM_THREADS=1 python scripts/bench_weight_sync.py

One process publishes, the other reads into tensors that it has. All transports and the copy work one after the other,
so that a busy machine is busy for all of them. The first versions are not counted: later ones use their memory again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from components.engines.weight_sync import (
    WeightHandle,
    WeightPublisher,
    read_weights,
)

# hidden size, layers, vocabulary
MODELS = {"0.8M": (128, 4, 512), "100M": (768, 11, 32_000)}
TRANSPORTS = ("shm", "disk", "tcp")
# Two versions' files are made, and then mapped, before all is as it stays.
WARM_UP = 4


def model_weights(size: str) -> dict[str, Tensor]:
    """Random float32 tensors of a transformer's shapes."""
    hidden, layers, vocabulary = MODELS[size]
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, hidden), "norm": (hidden,)}
    for layer in range(layers):
        shapes |= {f"{layer}.{name}": (hidden, hidden) for name in ("q", "k", "v", "o")}
        shapes |= {f"{layer}.up": (4 * hidden, hidden), f"{layer}.down": (hidden, 4 * hidden)}
        shapes |= {f"{layer}.{name}": (hidden,) for name in ("norm1", "norm2")}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def publish(orders: Connection, size: str, directories: dict[str, str]) -> None:
    """The other process: publishes when it is told to, and answers with the handle and the seconds."""
    weights = model_weights(size)
    publishers = {
        transport: WeightPublisher(Path(place) / f"weights-{transport}", serve=transport == "tcp")
        for transport, place in directories.items()
    }
    version = 0
    while (transport := orders.recv()) is not None:
        version += 1
        began = time.perf_counter()
        handle = publishers[transport].publish(version, weights.items())
        if transport == "tcp":
            handle = replace(handle, path="/on/another/machine")
        orders.send((handle, time.perf_counter() - began))
    for publisher in publishers.values():
        publisher.close()


def seconds(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def read_into(targets: dict[str, Tensor], handle: WeightHandle) -> None:
    for name, tensor in read_weights(handle, writable=False):
        targets[name].copy_(tensor)


@dataclass
class Times:
    """Seconds of each repeat."""

    copy: list[float] = field(default_factory=list)
    publish: dict[str, list[float]] = field(default_factory=lambda: {transport: [] for transport in TRANSPORTS})
    read: dict[str, list[float]] = field(default_factory=lambda: {transport: [] for transport in TRANSPORTS})
    first: dict[str, float] = field(default_factory=dict)
    """The first version's, publish and read."""


def measure(size: str, repeats: int, directories: dict[str, str]) -> Times:
    """Publish and read `repeats` times by each transport, after the warm-up."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=publish, args=(there, size, directories))
    process.start()
    source, targets = model_weights(size), model_weights(size)
    # One tensor, and not one by one: the copy is the speed of the memory.
    flat, flat_target = (torch.cat([tensor.view(-1) for tensor in each.values()]) for each in (source, targets))
    times = Times()
    for repeat in range(WARM_UP + repeats):
        copy = seconds(lambda: flat_target.copy_(flat))
        if repeat >= WARM_UP:
            times.copy.append(copy)
        for transport in TRANSPORTS:
            here.send(transport)
            handle, published = here.recv()
            read = seconds(lambda: read_into(targets, handle))  # noqa: B023 (called at once)
            if repeat == 0:
                times.first[transport] = published + read
            if repeat >= WARM_UP:
                times.publish[transport].append(published)
                times.read[transport].append(read)
    here.send(None)
    process.join()
    return times


def table(size: str, times: Times) -> str:
    """Medians, and GB/s of publish and read together."""
    nbytes = sum(tensor.nbytes for tensor in model_weights(size).values())
    copy = statistics.median(times.copy)
    lines = [
        f"{size}: {nbytes / 1e6:.1f} MB; {len(times.copy)} repeats, medians\n",
        "| | publish, ms | read, ms | both, GB/s | of the copy | first version, ms |",
        "|---|---|---|---|---|---|",
        f"| plain copy | | {copy * 1e3:.2f} | {nbytes / copy / 1e9:.2f} | 1 | |",
    ]
    for transport in TRANSPORTS:
        publish_s, read_s = (statistics.median(each[transport]) for each in (times.publish, times.read))
        both = statistics.median(map(sum, zip(times.publish[transport], times.read[transport], strict=True)))
        lines.append(
            f"| {transport} | {publish_s * 1e3:.2f} | {read_s * 1e3:.2f} | {nbytes / both / 1e9:.2f} "
            f"| {copy / both:.2f} | {times.first[transport] * 1e3:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=MODELS, default=list(MODELS), help="parameters, float32")
    parser.add_argument("--repeats", type=int, default=11, help="counted repeats")
    parser.add_argument("--shm", default="/dev/shm", help="a folder in shared memory")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder on a disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.shm) as memory, tempfile.TemporaryDirectory(dir=options.disk) as disk:
        directories = {"shm": memory, "disk": disk, "tcp": memory}
        for size in options.sizes:
            print(table(size, measure(size, options.repeats, directories)), flush=True)
            print()


if __name__ == "__main__":
    main()
