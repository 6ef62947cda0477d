"""What a call through core costs beside plain Ray that does the same work, interleaved in one run.

    python scripts/bench_core.py                      everything, about fifteen minutes on two cores
    python scripts/bench_core.py calls payload        some of it: simulated, start, calls, payload, flight, fanout, ...
    python scripts/bench_core.py --rounds 5           fewer pairs
    python scripts/bench_core.py fanout --workers 1 4 16
    python scripts/bench_core.py simulated            without Ray, half a minute

Each pair is one round of plain Ray and one of core, in an order that changes from pair to pair; what is printed are
medians, and the median of the pairs' ratios with its quartiles. Both sides are actors of the same size in the same
cluster, made from the same class.

`simulated` is about the driver alone: thousands of workers that are only numbers, each with a real control channel,
whose other ends are in another process. What the driver does for one worker must not depend on how many there are.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# The workers import this file too, by its own name.
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from core import BaseWorkload, Job, JobBuilder, RoleGroup, rpc, trainer_invocation  # noqa: E402 (see above)
from core.exports import Export, export_of  # noqa: E402
from core.members import Member, Outcome, Share, Transport  # noqa: E402
from core.supervise import master  # noqa: E402 (see above)
from core.supervise.control import Status  # noqa: E402
from core.supervise.worker_process import IDLE, Made, ProcessReport, ProcessSpec  # noqa: E402

WORKERS = (1, 2, 4, 8, 16, 32, 64)
SIMULATED = (64, 1000, 4000)
ITEMS = 100_000
MOST_BESIDE_RAY = 1.10
"""Of the time of plain Ray, a call through core may take so much."""
MOST_GROWTH = 1.20
"""From the fewest simulated workers to the most, the driver's CPU time for each may grow so much."""
APART_S = 0.00025
"""Between two answers of simulated workers that answer one by one."""


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


def light_job(count: int) -> Job:
    """A job of so many light workers."""
    builder = JobBuilder().device_type("CPU")
    builder.role("light").run("bench_core:Light").total(count).resource(cpu=0.01)
    return builder.build()


@contextlib.contextmanager
def plain_actors(count: int) -> Iterator[list[Any]]:
    """So many actors of plain Ray, each of which has answered once."""
    import ray

    actor: Any = ray.remote(PlainLight)
    actors = [actor.options(num_cpus=0.01).remote() for _ in range(count)]
    ray.get([one.nothing.remote() for one in actors])
    yield actors
    for one in actors:
        ray.kill(one)


@contextlib.contextmanager
def both_sides(count: int, plain: bool = True) -> Iterator[tuple[RoleGroup[Any], list[Any]]]:
    """A role group and a list of plain actors, equally many (or none)."""
    with light_job(count).running("bench"), plain_actors(count if plain else 0) as actors:
        yield RoleGroup("light"), actors


def compare(
    name: str,
    plain: Callable[[], Any],
    ours: Callable[[], Any],
    rounds: int,
    calls: int = 1,
    undo: Callable[[], Any] = lambda: None,
) -> float:
    """Print one line: medians per call, driver's CPU time per call, and the ratio of neighbours; returns its median.

    `undo` runs after each side, and is not counted.
    """
    pairs: list[dict[str, tuple[float, float]]] = []
    for index in range(rounds + 1):
        pair = {}
        sides = [("plain", plain), ("core", ours)]
        for side, work in sides if index % 2 else sides[::-1]:
            began, cpu = time.perf_counter(), time.process_time()
            work()
            pair[side] = ((time.perf_counter() - began) / calls, (time.process_time() - cpu) / calls)
            undo()
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


def bench_start(asked: argparse.Namespace) -> None:
    """From nothing to workers that have answered. Nearly all of it is the start of their processes, on both sides."""
    head("Start of a light class, per worker")
    for count in asked.workers:
        started = contextlib.ExitStack()

        def plainly(count: int = count, started: contextlib.ExitStack = started) -> None:
            started.enter_context(plain_actors(count))

        def ours(count: int = count, started: contextlib.ExitStack = started) -> None:
            started.enter_context(light_job(count).running("bench"))
            RoleGroup[Any]("light").call("nothing").result()

        # Each pair starts twice as many processes.
        rounds = max(2, asked.rounds // (1 + count // 4))
        compare(f"{count} workers", plainly, ours, rounds, count, started.close)


def bench_calls(asked: argparse.Namespace) -> None:
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

        compare("`RG.nothing()`", plainly, ours, asked.rounds, 200)


def bench_payload(asked: argparse.Namespace) -> None:
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

            compare(f"{megabytes} MB", plainly, ours, asked.rounds)


def bench_flight(asked: argparse.Namespace) -> None:
    """1,000 calls that are all on their way at once."""
    import ray

    head("1,000 small calls in flight to 2 workers, per call")
    with both_sides(2) as (group, plain):

        def plainly() -> None:
            ray.get([actor.nothing.remote() for _ in range(500) for actor in plain])

        def ours() -> None:
            for future in [group.call("nothing") for _ in range(500)]:
                future.result()

        compare("`group.call(...)`, then all results", plainly, ours, asked.rounds, 1000)


def bench_fanout(asked: argparse.Namespace) -> None:
    """The cost for each worker as the group grows.

    Both sides call the same processes, plain Ray a method of the actor that takes nothing and returns two words.
    Twice as many idle Ray processes would be a load by themselves.
    """
    import ray

    head("One call to all workers of a light class, per worker")
    ratios: dict[int, float] = {}
    with both_sides(max(asked.workers), plain=False) as (group, _):
        members = group._entry.members
        for count in asked.workers:
            group._entry.members = members[:count]
            times = max(2, 64 // count)

            def plainly(count: int = count, times: int = times) -> None:
                for _ in range(times):
                    ray.get([member.handle.doing.remote() for member in members[:count]])

            def ours(times: int = times) -> None:
                for _ in range(times):
                    group.nothing()

            ratios[count] = compare(f"{count} workers", plainly, ours, asked.rounds, times * count)
        group._entry.members = members
    most = max(ratios, key=lambda count: ratios[count])
    print(f"\nThe largest ratio is {ratios[most]:.2f}, of {most} workers; it is to be at most {MOST_BESIDE_RAY:.2f}.")


def bench_sequence(asked: argparse.Namespace) -> None:
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

        compare("`for item in sequence`", plainly, ours, asked.rounds)


def bench_memory(_: argparse.Namespace) -> None:
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
            future.result()
            print(f"{name}: {(max(peak, store_bytes()) - before) / 2**30:.3f} GiB", flush=True)


def store_bytes() -> int:
    """What is in use of the local object store."""
    import ray
    from ray._private.internal_api import memory_summary

    text = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    words = next(line for line in text.splitlines() if line.startswith("Plasma memory usage")).split()
    return int(float(words[3]) * 2**20)


# --- simulated workers


class Answer:
    """A reference: the value, and when it is there, on the monotonic clock."""

    __slots__ = ("at", "value")

    def __init__(self, value: Any, at: float) -> None:
        self.value = value
        self.at = at


class SimulatedTransport(Transport):
    """As core/members.py has it. Answers are there at once, or one by one, `apart_s` seconds from each other."""

    def __init__(self, apart_s: float) -> None:
        self._apart_s = apart_s
        self._last = 0.0

    def answer(self, value: Any) -> Answer:
        """What will be answered."""
        self._last = max(time.monotonic(), self._last + self._apart_s)
        return Answer(value, self._last)

    def send(self, member: Member, export: Export, share: Share) -> Answer:
        """Every method returns None."""
        del member, export, share
        return self.answer(None)

    def put(self, value: Any) -> Any:
        """There is nowhere to put it."""
        return value

    def wait(self, references: Sequence[Answer], timeout: float | None, count: int = 1) -> list[Answer]:
        """Those that are there, once `count` are, or after `timeout` seconds."""
        if references and timeout != 0:
            wanted = sorted(reference.at for reference in references)[min(count, len(references)) - 1]
            left = wanted - time.monotonic()
            time.sleep(max(0.0, left if timeout is None else min(left, timeout)))
        now = time.monotonic()
        return [reference for reference in references if reference.at <= now]

    def values(self, references: Sequence[Answer]) -> list[Any] | None:
        """All values, if they come within a moment."""
        if len(self.wait(references, 0.02, len(references))) < len(references):
            return None
        return [reference.value for reference in references]

    def outcome(self, reference: Answer) -> Outcome:
        """Nothing fails."""
        return Outcome(reference.value)


class SimulatedBackend:
    """A backend for core/supervise. A process is the specification that it is made from.

    `channels`: the other ends of the control channels; None: there are no channels.
    """

    is_local = False

    def __init__(self, apart_s: float = 0.0, channels: Channels | None = None) -> None:
        self.transport = SimulatedTransport(apart_s)
        self._channels = channels
        self._address: Any = None
        self._exports = {found.name: found for one in vars(Light).values() if (found := export_of(one))}

    def start(self, placement: Any, placement_timeout: float, info: Any) -> None:
        """There is room for all."""

    def create(self, spec: ProcessSpec) -> ProcessSpec:
        """Nothing is started."""
        if self._channels is not None and self._address is None:
            self._address = self._channels.listen(spec.run.key)
        return spec

    def invoke(self, handle: ProcessSpec, method: str, *args: Any) -> Answer:
        """What a process would answer."""
        del args
        value: Any = None
        if method == "report":
            # It is no process of this machine, which a signal could reach.
            value = ProcessReport("10.0.0.1", "simulated", 0, node="simulated", control=self._address)
        elif method == "construct":
            value = {role: Made(dict(self._exports), "bench_core.Light", False) for role in handle.roles}
        return self.transport.answer(value)

    def pickled(self, value: Any) -> Any:
        """It goes nowhere."""
        return value

    def kill(self, handle: ProcessSpec) -> None:
        """All end with the first."""
        del handle
        if self._channels is not None and self._address is not None:
            self._address = None
            self._channels.hang_up()

    def release(self) -> None:
        """Nothing was reserved."""

    def stop(self) -> None:
        """Nothing was started."""

    def fault(self) -> str:
        """Nothing can die."""
        return ""

    def dead_nodes(self) -> set[str]:
        """None."""
        return set()

    def room_missing(self) -> str:
        """Nothing."""
        return ""


def other_ends(told: Connection) -> None:
    """In a process of its own: the other ends of the control channels of one run after the other.

    It is told the key of a run and answers with the address; whatever it is told next ends that run's channels.
    """
    while True:
        with Listener(("127.0.0.1", 0), backlog=1000, authkey=told.recv()) as listener:
            told.send(listener.address)
            ends: list[Connection] = []
            threading.Thread(target=_let_in, args=(listener, ends), daemon=True).start()
            while not told.poll():
                for end in wait(list(ends), 0.1):
                    assert isinstance(end, Connection)
                    _answer(end, ends)
            told.recv()
            for end in ends:
                end.close()


def _let_in(listener: Listener, ends: list[Connection]) -> None:
    with contextlib.suppress(OSError):  # the listener was closed
        while True:
            ends.append(listener.accept())


def _answer(end: Connection, ends: list[Connection]) -> None:
    try:
        kind, *_ = end.recv()
        end.send((kind, Status(IDLE, 0.0, 0.0, 50 * 2**20) if kind == "status" else True))
    except (EOFError, OSError):  # the driver has hung up
        ends.remove(end)


class Channels:
    """The driver's side of `other_ends`."""

    def __init__(self) -> None:
        self._told, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=other_ends, args=(there,), daemon=True)
        self._process.start()

    def listen(self, key: bytes) -> Any:
        """Where the other ends of a run with this key are."""
        self._told.send(key)
        return self._told.recv()

    def hang_up(self) -> None:
        """End all channels of the run."""
        self._told.send(None)

    def close(self) -> None:
        """End the process."""
        self._process.kill()


@contextlib.contextmanager
def simulated(backend: SimulatedBackend) -> Iterator[None]:
    """Inside, every job's workers are simulated ones."""
    real = master.make_backend
    master.make_backend = lambda *_: backend
    try:
        yield
    finally:
        master.make_backend = real


def driver_seconds(count: int, backend: SimulatedBackend, calls: int, idle_s: int = 0) -> dict[str, float]:
    """The driver's CPU seconds for each of so many workers: of the plan, the start, one call to all, and the end.

    `idle`: of a second in which nothing happens, if there are to be `idle_s` of them. Python's garbage collector is
    off: a full pass looks at all objects, and it is chance whether one falls into what is measured.
    """
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def counted(what: str, times: int = 1) -> Iterator[None]:
        began = time.process_time()
        yield
        seconds[what] = (time.process_time() - began) / count / times

    gc.collect()
    gc.disable()
    with simulated(backend), contextlib.ExitStack() as running:
        running.callback(gc.enable)
        with counted("plan"):
            job = light_job(count)
        with counted("start"):
            running.enter_context(job.running("simulated"))
        group = RoleGroup[Any]("light")
        with counted("call", calls):
            for _ in range(calls):
                assert len(group.call("nothing").result()) == count
        if idle_s:
            with counted("idle", idle_s):
                time.sleep(idle_s)
        with counted("end"):
            running.close()
    return seconds


def bench_simulated(asked: argparse.Namespace) -> None:
    """The driver's CPU time for each worker, as there are more and more of them; the least of several times."""
    print("\nCPU time of the driver for each simulated worker, in microseconds")
    channels = Channels()
    print("\nEach has a control channel, and returns at once\n")
    table_of_driver(asked.simulated, lambda: SimulatedBackend(channels=channels), idle_s=1)
    channels.close()
    print(f"\nWithout control channels; results are {1e3 * APART_S:g} ms from each other\n")
    table_of_driver(asked.simulated, lambda: SimulatedBackend(APART_S))


def table_of_driver(counts: Sequence[int], backend: Callable[[], SimulatedBackend], idle_s: int = 0) -> None:
    """Print a row for each number of workers, and how much more each takes of the most than of the fewest."""
    least: dict[int, dict[str, float]] = {}
    for count in sorted(counts):
        calls = max(1, 2000 // count)
        runs = [driver_seconds(count, backend(), calls, idle_s) for _ in range(3)]
        least[count] = {what: min(run[what] for run in runs) for what in runs[0]}
        if len(least) == 1:
            print(f"| workers | {' | '.join(least[count])} |\n|---{'|---' * len(least[count])}|")
        cells = " | ".join(f"{1e6 * seconds:.1f}" for seconds in least[count].values())
        print(f"| {count:,} | {cells} |", flush=True)
    first, last = least[min(least)], least[max(least)]
    cells = " | ".join(f"{last[what] / first[what]:.2f}" for what in first)
    print(f"| last / first, to be at most {MOST_GROWTH:.2f} | {cells} |", flush=True)


BENCHES: dict[str, Callable[[argparse.Namespace], None]] = {
    "start": bench_start,
    "calls": bench_calls,
    "payload": bench_payload,
    "flight": bench_flight,
    "fanout": bench_fanout,
    "sequence": bench_sequence,
    "memory": bench_memory,
}


def on_ray(asked: argparse.Namespace, names: Sequence[str]) -> None:
    """Run what needs Ray in one cluster of its own."""
    import ray

    from core.backends.ray_token import own_token
    from core.shared_memory import shared_folder

    with own_token(shared_folder(f"bench-{os.getpid()}")):
        ray.init(
            address="local", num_cpus=8, include_dashboard=False, object_store_memory=4 * 2**30, log_to_driver=False
        )
        print(f"ray {ray.__version__}, {asked.rounds} pairs each")
        for name in names:
            BENCHES[name](asked)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", choices=["simulated", *BENCHES, []], help="which; all without any")
    parser.add_argument("--rounds", type=int, default=21, help="pairs of each")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="numbers of real workers")
    parser.add_argument("--simulated", type=int, nargs="+", default=SIMULATED, help="numbers of simulated workers")
    asked = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    # Ray's own choice is 15: whatever else runs on the machine would keep the workers from working.
    os.environ.setdefault("RAY_worker_niceness", "0")
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    names = asked.benches or ["simulated", *BENCHES]
    if "simulated" in names:
        bench_simulated(asked)
    if others := [name for name in names if name != "simulated"]:
        on_ray(asked, others)


if __name__ == "__main__":
    main()
