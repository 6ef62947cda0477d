"""Measure the gathering of sharded weights on rank 0: in buckets, and parameter by parameter as DTensor does it.

    OMP_NUM_THREADS=1 python scripts/bench_gather.py --ranks 2 4

The ranks are processes of this machine, connected by gloo. Each has its rows of every weight. The two ways alternate,
so that other load of the machine affects both. It prints medians, and the maximum growth of rank 0's memory beyond its
own rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from components.weights.gather import gathered
from components.weights.parts import part_of

BUCKET_BYTES = 256 * 2**20
SIZES = {"100M": (768, 11, 32_000), "1B": (2048, 18, 32_000)}
"""Hidden size, number of layers, and vocabulary size."""
CPU = torch.device("cpu")


def shapes(size: str) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a transformer's weights."""
    hidden, layers, vocabulary = SIZES[size]
    yield vocabulary, hidden
    for _ in range(layers):
        yield from [(hidden, hidden)] * 4
        yield from [(4 * hidden, hidden), (hidden, 4 * hidden), (hidden,), (hidden,)]


def in_buckets(weights: list[Any], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Gather in buckets. Yields on rank 0 only."""
    return gathered(((str(i), part_of(w, dtype, CPU)) for i, w in enumerate(weights)), CPU, BUCKET_BYTES)


def one_by_one(weights: list[Any], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Gather each parameter with DTensor. Yields on rank 0 only."""
    for i, weight in enumerate(weights):
        full = weight.to(dtype).full_tensor()
        if dist.get_rank() == 0:
            yield str(i), full.cpu()


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rank(number: int, ranks: int, port: int, size: str, repeats: int, results: SimpleQueue[Any]) -> None:
    """Entry point of one rank: gather alternately in both ways. Rank 0 sends the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    weights = [distribute_tensor(torch.ones(shape), mesh, [Shard(0)]) for shape in shapes(size)]
    times: dict[str, list[tuple[float, int]]] = {"in buckets": [], "one by one": []}
    for _ in range(1 + repeats):
        for name, way in (("in buckets", in_buckets), ("one by one", one_by_one)):
            # Without the barrier, waiting for a late rank would count as gathering.
            dist.barrier()
            before = resident()
            most = 0
            began = time.perf_counter()
            for _, tensor in way(weights, torch.float32):
                most = max(most, resident() - before)
                # Reading the tensor shows that it is complete, and that its memory is really allocated.
                assert float(tensor.view(-1)[-1]) == 1.0
            times[name].append((time.perf_counter() - began, most))
    if number == 0:
        nbytes = sum(weight.numel() for weight in weights) * 4
        results.put((nbytes, {name: measured[1:] for name, measured in times.items()}))


def measure(ranks: int, size: str, repeats: int) -> str:
    """Return the rows of the table for a number of ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = multiprocessing.get_context("spawn")
    results: SimpleQueue[Any] = processes.SimpleQueue()
    running = [
        processes.Process(target=rank, args=(number, ranks, port, size, repeats, results)) for number in range(ranks)
    ]
    for process in running:
        process.start()
    # Read before the join: rank 0 cannot end while its results are still in the queue.
    nbytes, times = results.get()
    for process in running:
        process.join()
    lines = []
    for name, measured in times.items():
        seconds = statistics.median(took for took, _ in measured)
        most = max(grown for _, grown in measured)
        lines.append(
            f"| {size} | {ranks} | {name} | {seconds:.2f} | {nbytes / seconds / 1e9:.2f} | {most / 1e6:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["100M"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| parameters | ranks | | s | GB/s | rank 0 grew by, MB |\n|---|---|---|---|---|---|")
    for size in options.sizes:
        for ranks in options.ranks:
            print(measure(ranks, size, options.repeats), flush=True)


if __name__ == "__main__":
    main()
