"""Measure the cost of a Batch: its operations on 200,000 sequences, and its transfer compared with plain numpy.

    python scripts/bench_batch.py                       both, about a minute
    python scripts/bench_batch.py ops                   seconds of each operation, on one thread
    python scripts/bench_batch.py crossing              64 MB to a Ray actor and back
    python scripts/bench_batch.py crossing --rounds 5   fewer rounds

Each round of `crossing` sends one numpy array, the columns as a list of numpy arrays, and the Batch through the same
actor. All have the same number of bytes, and their order changes from round to round. It prints medians, and the
medians of the ratios within a round with their quartiles. Ray copies each array with its own threads and waits for
them, so that several arrays take longer than one on busy cores.

`ops` prints medians of wall time and of CPU time. CPU time is more reliable on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
# The workers inherit this path and import the packages of the project too.
sys.path[:0] = [str(ROOT)]

from components.batch import Batch  # noqa: E402 (the project may not be installed)
from components.batch.grouping import group_by  # noqa: E402
from components.batch.reading import load_batch  # noqa: E402
from core.backends.ray_token import own_token  # noqa: E402
from core.shared_memory import shared_folder  # noqa: E402

SEQUENCES = 200_000
MEAN_LENGTH = 50
GROUP_SIZE = 8
MEGABYTES = 64


class Echo:
    """An actor that returns its argument."""

    def echo(self, payload: Any) -> Any:
        return payload


def four_columns(sequences: int) -> Batch:
    """Return sequences of 1 to 500 tokens (50 on average) with four token columns and their prompt id."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.empty(sequences).exponential_(1 / MEAN_LENGTH, generator=random).clamp(1, 10 * MEAN_LENGTH).long()
    size = int(lengths.sum())
    return Batch(
        lengths,
        {
            "tokens": torch.randint(0, 150_000, (size,), generator=random),
            "logprob": torch.randn(size, generator=random),
            "action_mask": torch.rand(size, generator=random) < 0.5,
            "advantage": torch.randn(size, generator=random),
        },
        {"prompt_id": torch.arange(sequences) // GROUP_SIZE},
    )


def seconds(work: Callable[[], Any]) -> tuple[float, float]:
    """Return (wall seconds, CPU seconds) of one call, without freeing its result."""
    began = time.perf_counter()
    cpu = time.process_time()
    result = work()
    took = time.perf_counter() - began, time.process_time() - cpu
    # Only now, because freeing a large batch takes time that is no part of the operation.
    del result
    return took


def bench_ops(rounds: int) -> None:
    """Print the time of each operation."""
    torch.set_num_threads(1)
    batch = four_columns(SEQUENCES)
    print(f"\n{batch}, {batch.nbytes / 1e6:.0f} MB, one thread\n\n| | seconds | of CPU |\n|---|---|---|")
    order = torch.randperm(SEQUENCES, generator=torch.Generator().manual_seed(0))
    parts = batch.split(8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch.parquet"
        operations: dict[str, Callable[[], Any]] = {
            "`Batch(...)`": lambda: Batch(batch.lengths, batch.per_token, batch.per_sequence),
            "`split(8)`": lambda: batch.split(8),
            "`balanced_shares(8)`": lambda: batch.balanced_shares(8, attention=1 / 24576),
            "`select(permutation)`": lambda: batch.select(order),
            "`concat` of 8": lambda: Batch.concat(parts),
            "`packed()`": batch.packed,
            f"`group_by`, {SEQUENCES // GROUP_SIZE:,} groups": lambda: group_by(batch, "prompt_id"),
            "`save`": lambda: batch.save(path),
            "`load`": lambda: load_batch(path),
        }
        for name, work in operations.items():
            seconds(work)  # a warm-up, which also writes the file for `load`
            wall, cpu = map(statistics.median, zip(*(seconds(work) for _ in range(rounds)), strict=True))
            print(f"| {name} | {wall:.4f} | {cpu:.4f} |", flush=True)


def ratio(times: list[float], beside: list[float]) -> str:
    """Return the median of the ratios within the rounds, with their quartiles, as text."""
    low, median, high = statistics.quantiles([mine / other for mine, other in zip(times, beside, strict=True)], n=4)
    return f"{median:.2f} ({low:.2f} .. {high:.2f})"


def bench_crossing(rounds: int) -> None:
    """Print the time of sending 64 MB to an actor and back."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=2 * 2**30, log_to_driver=False)
    target_bytes = MEGABYTES * 2**20
    # Lengths are random, so the size of a small batch tells how many sequences have the wanted size.
    few = four_columns(10_000)
    batch = four_columns(10_000 * target_bytes // few.nbytes)
    array = np.ones(batch.nbytes, np.uint8)
    remote: Any = ray.remote(Echo)
    actor = remote.remote()

    columns = [x.numpy() for x in (batch.lengths, *batch.per_token.values(), *batch.per_sequence.values())]
    payloads: dict[str, Any] = {"one array": array, "its columns": columns, "Batch": batch}
    # All orders take their turn. Otherwise a payload would always profit from the memory that the one before it used.
    orders = list(itertools.permutations(payloads))
    taken: dict[str, list[float]] = {name: [] for name in payloads}
    for index in range(rounds + 1):
        for name in orders[index % len(orders)]:
            taken[name].append(seconds(lambda name=name: ray.get(actor.echo.remote(payloads[name])))[0])
    print(f"\n{batch}, {batch.nbytes / 2**20:.1f} MiB, to a Ray actor and back (read-only), {rounds} rounds\n")
    print("| | ms | of one array (quartiles) | of its columns (quartiles) |\n|---|---|---|---|")
    for name, times in taken.items():
        ratios = (ratio(times[1:], taken[beside][1:]) for beside in ("one array", "its columns"))  # the first warms up
        print(f"| {name} | {statistics.median(times[1:]) * 1e3:.1f} | {' | '.join(ratios)} |", flush=True)
    ray.shutdown()


BENCHES: dict[str, Callable[[int], None]] = {"ops": bench_ops, "crossing": bench_crossing}


def main() -> None:
    """Run the selected benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", choices=[*BENCHES, []], help="benchmarks to run (default: both)")
    parser.add_argument("--rounds", type=int, help="number of rounds (default: 5 for ops, 21 for crossing)")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, torch {torch.__version__}")
    with own_token(shared_folder(f"bench-{os.getpid()}")):
        for name in options.benches or BENCHES:
            BENCHES[name](options.rounds or {"ops": 5, "crossing": 21}[name])


if __name__ == "__main__":
    main()
