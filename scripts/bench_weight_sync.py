"""Measure the transfer of weights from one process into tensors of another, compared with a plain copy.

    OMP_NUM_THREADS=1 python scripts/bench_weight_sync.py
    OMP_NUM_THREADS=1 python scripts/bench_weight_sync.py --ranks 2 4 --engines 1 2 --parts 1 2 --sizes 100M 1B

One process publishes, the other reads into existing tensors. All transports and the copy alternate, so that other load
of the machine affects all of them. The first versions are not counted, because later ones reuse their memory. Shares
are of wall time and of CPU time, which other load changes less.

With --ranks the weights are bfloat16 and sharded by rows over this number of processes, which gather them over gloo
while rank 0 publishes. Then all parts of all engines read at the same time, and each keeps its rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_gather import SIZES, in_buckets, shapes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from components.weights.publisher import (
    WeightHandle,
    WeightPublisher,
    read_weights,
)

# (hidden size, number of layers, vocabulary size)
MODELS = {"0.8M": (128, 4, 512), "100M": (768, 11, 32_000)}
TRANSPORTS = ("shm", "disk", "tcp")
# The first two versions create their files, and the next two map them. After that nothing is allocated.
WARM_UP = 4
COPIED_BYTES = 2**28
"""Size of the plain copy in a sync of ranks. It is larger than the caches, so its speed is that of any larger size."""
Cost = tuple[float, float]
"""(wall seconds, CPU seconds)."""


def model_weights(size: str) -> dict[str, Tensor]:
    """Return random float32 tensors with the shapes of a transformer."""
    hidden, layers, vocabulary = MODELS[size]
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, hidden), "norm": (hidden,)}
    for layer in range(layers):
        shapes |= {f"{layer}.{name}": (hidden, hidden) for name in ("q", "k", "v", "o")}
        shapes |= {f"{layer}.up": (4 * hidden, hidden), f"{layer}.down": (hidden, 4 * hidden)}
        shapes |= {f"{layer}.{name}": (hidden,) for name in ("norm1", "norm2")}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def publish(orders: Connection, size: str, directories: dict[str, str]) -> None:
    """Entry point of the publishing process. For each request it publishes a version, and returns handle and cost."""
    weights = model_weights(size)
    publishers = {
        transport: WeightPublisher(Path(place) / f"weights-{transport}", serve=transport == "tcp")
        for transport, place in directories.items()
    }
    version = 0
    while (transport := orders.recv()) is not None:
        version += 1
        handles: list[WeightHandle] = []
        took = cost(lambda: handles.append(publishers[transport].publish(version, weights.items())))  # noqa: B023
        if transport == "tcp":
            # A reader that cannot open the path asks the server, as on another machine.
            handles = [replace(handles[0], path="/on/another/machine")]
        orders.send((handles[0], took))
    for publisher in publishers.values():
        publisher.close()


def cost(work: Callable[[], object]) -> Cost:
    """Return the cost of a call in this process."""
    began = time.perf_counter()
    worked = time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - worked


def together(costs: Iterable[Cost]) -> Cost:
    """Return the sum of costs."""
    walls, cores = zip(*costs, strict=True)
    return sum(walls), sum(cores)


def median(costs: list[Cost]) -> Cost:
    walls, cores = zip(*costs, strict=True)
    return statistics.median(walls), statistics.median(cores)


def read_into(targets: dict[str, Tensor], handle: WeightHandle) -> None:
    for name, tensor in read_weights(handle, writable=False):
        targets[name].copy_(tensor)


@dataclass
class Times:
    """Costs of each repeat."""

    copy: list[Cost] = field(default_factory=list)
    publish: dict[str, list[Cost]] = field(default_factory=lambda: {transport: [] for transport in TRANSPORTS})
    read: dict[str, list[Cost]] = field(default_factory=lambda: {transport: [] for transport in TRANSPORTS})
    first: dict[str, float] = field(default_factory=dict)
    """Seconds of publishing and reading the first version."""


def measure(size: str, repeats: int, directories: dict[str, str]) -> Times:
    """Publish and read `repeats` times by each transport, after the warm-up."""
    orders, other_side = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=publish, args=(other_side, size, directories))
    process.start()
    source = model_weights(size)
    targets = model_weights(size)
    # As one tensor, so that the copy measures the memory and not the number of calls.
    flat, flat_target = (torch.cat([tensor.view(-1) for tensor in each.values()]) for each in (source, targets))
    times = Times()
    for repeat in range(WARM_UP + repeats):
        copy = cost(lambda: flat_target.copy_(flat))
        if repeat >= WARM_UP:
            times.copy.append(copy)
        for transport in TRANSPORTS:
            orders.send(transport)
            handle, published = orders.recv()
            read = cost(lambda: read_into(targets, handle))  # noqa: B023 (called at once)
            if repeat == 0:
                times.first[transport] = published[0] + read[0]
            if repeat >= WARM_UP:
                times.publish[transport].append(published)
                times.read[transport].append(read)
    orders.send(None)
    process.join()
    return times


def table(size: str, times: Times) -> str:
    """Return the table: medians, and GB/s and shares of publishing and reading together."""
    nbytes = sum(tensor.nbytes for tensor in model_weights(size).values())
    copy, copy_core = median(times.copy)
    lines = [
        f"{size}: {nbytes / 1e6:.1f} MB; {len(times.copy)} repeats, medians\n",
        "| | publish, ms | read, ms | both, GB/s | of the copy | on a core | first version, ms |",
        "|---|---|---|---|---|---|---|",
        f"| plain copy | | {copy * 1e3:.2f} | {nbytes / copy / 1e9:.2f} | 1 | 1 | |",
    ]
    for transport in TRANSPORTS:
        publish_s, read_s = (median(each[transport])[0] for each in (times.publish, times.read))
        both, both_core = median(
            [together(pair) for pair in zip(times.publish[transport], times.read[transport], strict=True)]
        )
        lines.append(
            f"| {transport} | {publish_s * 1e3:.2f} | {read_s * 1e3:.2f} | {nbytes / both / 1e9:.2f} "
            f"| {copy / both:.2f} | {copy_core / both_core:.2f} | {times.first[transport] * 1e3:.1f} |"
        )
    return "\n".join(lines)


def own_memory() -> int:
    """Return the memory of this process that it shares with no other, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def watched(tensors: Iterable[tuple[str, Tensor]], grown: list[int]) -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors, and append the growth of the memory at each to `grown`."""
    before = own_memory()
    for item in tensors:
        grown.append(own_memory() - before)
        yield item


def rank(number: int, ranks: int, port: int, size: str, repeats: int, place: str, orders: Connection | None) -> None:
    """Entry point of one rank, which has its rows of every weight. Rank 0 publishes on each order."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    weights = [distribute_tensor(torch.ones(shape).bfloat16(), mesh, [Shard(0)]) for shape in shapes(size)]
    publisher = None
    if orders is not None:
        publisher = WeightPublisher(place)
    source, target = torch.ones(2, COPIED_BYTES, dtype=torch.uint8)
    for version in range(1, 1 + WARM_UP + repeats):
        copy = cost(lambda: target.copy_(source))
        if orders is not None:
            orders.recv()
        dist.barrier()
        grown: list[int] = []
        tensors = watched(in_buckets(weights, torch.bfloat16), grown)
        handles: list[WeightHandle] = []
        if orders is None or publisher is None:
            # Gathering is collective: this rank has to take part, and gets no tensors.
            assert list(tensors) == []
            continue
        took = cost(lambda: handles.append(publisher.publish(version, tensors)))  # noqa: B023 (called at once)
        orders.send((handles[0], took, max(grown), copy))
    if orders is not None and publisher is not None:
        orders.recv()
        publisher.close()


def engine_part(part: int, parts: int, size: str, orders: Connection) -> None:
    """Entry point of one part of an engine, which keeps its rows of every weight."""
    torch.set_num_threads(1)
    # Clones, because a slice would keep the full weight in memory.
    targets = {str(i): torch.ones(shape).bfloat16().chunk(parts)[part].clone() for i, shape in enumerate(shapes(size))}
    nbytes = sum(target.nbytes for target in targets.values())
    while (handle := orders.recv()) is not None:
        grown: list[int] = []

        def keep() -> None:
            for name, tensor in watched(read_weights(handle, writable=False), grown):  # noqa: B023 (called at once)
                targets[name].copy_(tensor.chunk(parts)[part])

        orders.send((cost(keep), max(grown), nbytes))


def sync_row(size: str, ranks: int, engines: int, parts: int, repeats: int, place: str) -> str:
    """Return a row of the table of complete syncs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = multiprocessing.get_context("spawn")
    to_rank_0, at_rank_0 = processes.Pipe()
    running: list[Any] = []
    for number in range(ranks):
        connection = at_rank_0 if number == 0 else None
        running.append(processes.Process(target=rank, args=(number, ranks, port, size, repeats, place, connection)))
    readers = []
    for number in range(engines * parts):
        reader, at_reader = processes.Pipe()
        readers.append(reader)
        running.append(processes.Process(target=engine_part, args=(number % parts, parts, size, at_reader)))
    for process in running:
        process.start()
    syncs = []
    nbytes = kept = 0
    for _ in range(WARM_UP + repeats):
        to_rank_0.send("go")
        handle, publish, grown, copy = to_rank_0.recv()
        for reader in readers:
            reader.send(handle)
        read = [reader.recv() for reader in readers]
        nbytes = handle.nbytes
        kept = read[0][2]
        # The slowest reader decides when a sync ends.
        syncs.append((publish, max(took for took, _, _ in read), grown, max(each for _, each, _ in read), copy))
    for connection in (to_rank_0, *readers):
        connection.send(None)
    for process in running:
        process.join()
    syncs = syncs[WARM_UP:]
    (publish, _), (read_s, _), (copy, _) = (median([each[i] for each in syncs]) for i in (0, 1, 4))
    grown = [max(each[i] for each in syncs) / 1e6 for i in (2, 3)]
    moved = [nbytes * (ranks - 1) / ranks / 1e6, nbytes / 1e6, kept / 1e6]
    copied = copy * nbytes / COPIED_BYTES
    return (
        f"| {size} | {ranks} | {engines} x {parts} | {publish:.2f} | {read_s:.2f} | {copied:.2f} "
        f"| {moved[0]:,.0f} | {moved[1]:,.0f} | {moved[2]:,.0f} | {grown[0]:,.0f} | {grown[1]:,.0f} |"
    )


def sync_table(options: argparse.Namespace, place: str) -> None:
    """Print the table of complete syncs."""
    heads = "parameters | ranks | engines x parts | gather and publish, s | read, s | plain copy, s | to rank 0, MB"
    heads += " | to shared memory | each part keeps | rank 0 grew by, MB | a part grew by, MB"
    print(f"| {heads} |\n|{'---|' * 11}")
    for size in options.sizes:
        for ranks in options.ranks:
            for engines in options.engines:
                for parts in options.parts:
                    print(sync_row(size, ranks, engines, parts, options.repeats, f"{place}/sync"), flush=True)


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices={*MODELS, *SIZES}, default=list(MODELS), help="parameters")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of processes over which the weights are sharded")
    parser.add_argument(
        "--engines", type=int, nargs="+", default=[1], help="numbers of engines that read, with --ranks"
    )
    parser.add_argument(
        "--parts", type=int, nargs="+", default=[1], help="numbers of processes per engine, with --ranks"
    )
    parser.add_argument("--repeats", type=int, default=11, help="counted repeats")
    parser.add_argument("--shm", default="/dev/shm", help="a folder in shared memory")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder on a disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.shm) as memory, tempfile.TemporaryDirectory(dir=options.disk) as disk:
        if options.ranks:
            sync_table(options, memory)
            return
        directories = {"shm": memory, "disk": disk, "tcp": memory}
        for size in options.sizes:
            print(table(size, measure(size, options.repeats, directories)), flush=True)
            print()


if __name__ == "__main__":
    main()
