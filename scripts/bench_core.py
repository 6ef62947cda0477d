"""What a call through core costs beside plain Ray that does the same work, interleaved in one run.

    python scripts/bench_core.py                     everything, about five minutes on two cores
    python scripts/bench_core.py calls payload       some of it: calls, payload, flight, fanout, sequence, memory
    python scripts/bench_core.py --rounds 5          fewer pairs

Each pair is one round of plain Ray and one of core, in an order that changes from pair to pair; what is printed are
medians, and the median of the pairs' ratios with its quartiles. Both sides are actors of the same size in the same
cluster, made from the same class.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# The workers import this file too, by its own name.
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from core import BaseWorkload, JobBuilder, RoleGroup, rpc, trainer_invocation  # noqa: E402 (may not be installed)
from core.backends.ray_token import own_token  # noqa: E402
from core.shared_memory import shared_folder  # noqa: E402

FANOUT = (1, 2, 4, 8, 16, 32, 64)
ITEMS = 100_000


class Light(BaseWorkload):
    """As little as a worker can be."""

    @trainer_invocation
    def nothing(self) -> None: ...

    @trainer_invocation
    def echo(self, array: Any) -> Any:
        return array

    @rpc()
    def length_each(self, batch: Any) -> list[int]:
        time.sleep(4)  # until all have been sent, and counted
        return [0] * len(batch)

    @rpc()
    def double(self, items: list[int]) -> list[int]:
        return [2 * item for item in items]


class PlainLight:
    """The same for plain Ray."""

    def nothing(self) -> None: ...

    def echo(self, array: Any) -> Any:
        return array

    def double(self, items: list[int]) -> list[int]:
        return [2 * item for item in items]


@contextlib.contextmanager
def both_sides(count: int, plain: bool = True) -> Iterator[tuple[RoleGroup, list[Any]]]:
    """A role group and a list of plain actors, equally many (or none)."""
    import ray

    builder = JobBuilder().device_type("CPU")
    builder.role("light").run("bench_core:Light").total(count).resource(cpu=0.01)
    with builder.build().running("bench"):
        actor: Any = ray.remote(PlainLight)
        actors = [actor.options(num_cpus=0.01).remote() for _ in range(count if plain else 0)]
        ray.get([one.nothing.remote() for one in actors])
        yield RoleGroup("light"), actors
        for one in actors:
            ray.kill(one)


def compare(name: str, plain: Callable[[], Any], ours: Callable[[], Any], rounds: int, calls: int = 1) -> float:
    """Print one line: medians per call, driver's CPU time per call, and the ratio of neighbours."""
    pairs: list[dict[str, tuple[float, float]]] = []
    for index in range(rounds + 1):
        pair = {}
        sides = [("plain", plain), ("core", ours)]
        for side, work in sides if index % 2 else sides[::-1]:
            began, cpu = time.perf_counter(), time.process_time()
            work()
            pair[side] = ((time.perf_counter() - began) / calls, (time.process_time() - cpu) / calls)
        pairs.append(pair)
    pairs = pairs[1:]  # the first warms both up
    ratios = sorted(pair["core"][0] / pair["plain"][0] for pair in pairs)
    low, median, high = statistics.quantiles(ratios, n=4)
    wall = {side: statistics.median(pair[side][0] for pair in pairs) * 1e3 for side in ("plain", "core")}
    cpu = {side: statistics.median(pair[side][1] for pair in pairs) * 1e3 for side in ("plain", "core")}
    print(
        f"| {name} | {wall['plain']:.3f} | {wall['core']:.3f} | {median:.2f} ({low:.2f} .. {high:.2f}) | "
        f"{wall['core'] - wall['plain']:+.3f} | {cpu['plain']:.3f} | {cpu['core']:.3f} |",
        flush=True,
    )
    return median


def head(title: str) -> None:
    """The head of a table."""
    print(f"\n{title}\n\n| | plain Ray, ms | core, ms | ratio (quartiles) | difference, ms | driver CPU | core's |")
    print("|---|---|---|---|---|---|---|")


def bench_calls(rounds: int) -> None:
    """No payload, two workers."""
    import ray

    head("Calls without payload to 2 workers, 200 one after the other")
    with both_sides(2) as (group, plain):

        def plainly() -> None:
            for _ in range(200):
                ray.get([actor.nothing.remote() for actor in plain])

        def ours() -> None:
            for _ in range(200):
                group.nothing()

        compare("`RG.nothing()`", plainly, ours, rounds, 200)


def bench_payload(rounds: int) -> None:
    """4 MB and 64 MB of float32 out and back."""
    import ray

    head("An array of float32 to 2 workers, half to each, and back (read-only)")
    with both_sides(2) as (group, plain):
        for megabytes in (4, 64):
            array = np.ones(megabytes * 2**18, np.float32)
            half = len(array) // 2

            def plainly(array: Any = array, half: int = half) -> None:
                back = ray.get([plain[0].echo.remote(array[:half]), plain[1].echo.remote(array[half:])])
                assert not back[0].flags.writeable

            def ours(array: Any = array) -> None:
                back = group.echo(array)
                assert not back[0].flags.writeable

            compare(f"{megabytes} MB", plainly, ours, rounds)


def bench_flight(rounds: int) -> None:
    """1,000 calls that are all on their way at once."""
    import ray

    head("1,000 small calls in flight to 2 workers, per call")
    with both_sides(2) as (group, plain):

        def plainly() -> None:
            ray.get([actor.nothing.remote() for _ in range(500) for actor in plain])

        def ours() -> None:
            for future in [group.call("nothing") for _ in range(500)]:
                future.result()

        compare("`group.call(...)`, then all results", plainly, ours, rounds, 1000)


def bench_fanout(rounds: int) -> None:
    """The cost for each worker as the group grows.

    Both sides call the same 64 processes, plain Ray a method of the actor that takes nothing and returns two words.
    Twice as many idle Ray processes would be a load by themselves.
    """
    import ray

    head("One call to all workers of a light class, per worker")
    with both_sides(max(FANOUT), plain=False) as (group, _):
        members = group._entry.members
        for count in FANOUT:
            group._entry.members = members[:count]
            times = max(2, 64 // count)

            def plainly(count: int = count, times: int = times) -> None:
                for _ in range(times):
                    ray.get([member.handle.doing.remote() for member in members[:count]])

            def ours(times: int = times) -> None:
                for _ in range(times):
                    group.nothing()

            compare(f"{count} workers", plainly, ours, rounds, times * count)
        group._entry.members = members


def bench_sequence(rounds: int) -> None:
    """A FutureSequence of 100,000 items."""
    import ray

    head(f"{ITEMS:,} integers split over 4 workers and read back one by one")
    items = list(range(ITEMS))
    with both_sides(4) as (group, plain):

        def plainly() -> None:
            size = ITEMS // 4
            parts = ray.get([actor.double.remote(items[i * size : (i + 1) * size]) for i, actor in enumerate(plain)])
            assert sum(1 for part in parts for _ in part) == ITEMS

        def ours() -> None:
            assert sum(1 for _ in group.call_batch("double", ITEMS, items)) == ITEMS

        compare("`for item in sequence`", plainly, ours, rounds)


def bench_memory(_: int) -> None:
    """What 1 GB that is split over 4 workers takes in the object store on its way out."""
    import torch

    from components.batch import Batch

    print(
        "\n1 GB split over 4 workers: bytes in the object store, which holds every copy that was made on the way out\n"
    )
    with both_sides(4) as (group, _plain):
        rows = 4000
        tokens = torch.ones(rows, 2**30 // 8 // rows, dtype=torch.int64)
        batch = Batch.from_rows({"tokens": list(tokens)})
        for name, value in (("array", np.ones(2**28, np.float32)), ("Batch", batch)):
            before = store_bytes()
            peak = before
            future = group.call_batch("length_each", len(value), value)
            while not future.done():
                peak = max(peak, store_bytes())
            future.wait()
            print(f"{name}: {(max(peak, store_bytes()) - before) / 2**30:.3f} GiB", flush=True)


def store_bytes() -> int:
    """What is in use of the local object store."""
    import ray
    from ray._private.internal_api import memory_summary

    text = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    words = next(line for line in text.splitlines() if line.startswith("Plasma memory usage")).split()
    return int(float(words[3]) * 2**20)


BENCHES: dict[str, Callable[[int], None]] = {
    "calls": bench_calls,
    "payload": bench_payload,
    "flight": bench_flight,
    "fanout": bench_fanout,
    "sequence": bench_sequence,
    "memory": bench_memory,
}


def main() -> None:
    """Run what was asked for in one cluster of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", choices=[*BENCHES, []], help="which; all without any")
    parser.add_argument("--rounds", type=int, default=21, help="pairs of each")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    import ray

    with own_token(shared_folder(f"bench-{os.getpid()}")):
        ray.init(
            address="local", num_cpus=8, include_dashboard=False, object_store_memory=4 * 2**30, log_to_driver=False
        )
        versions = f"Python {sys.version.split()[0]}, ray {ray.__version__}"
        print(f"{os.cpu_count()} cores, {versions}, {options.rounds} pairs each")
        for name in options.benches or BENCHES:
            BENCHES[name](options.rounds)


if __name__ == "__main__":
    main()
