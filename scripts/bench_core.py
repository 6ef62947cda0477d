"""Measure the overhead of calls through core compared with plain Ray, interleaved in one run.

    python scripts/bench_core.py                      all benchmarks, about fifteen minutes on two cores
    python scripts/bench_core.py calls payload        some: simulated, start, calls, payload, flight, fanout, ...
    python scripts/bench_core.py --rounds 5           fewer pairs
    python scripts/bench_core.py fanout --workers 1 4 16
    python scripts/bench_core.py simulated            without Ray, half a minute

Each pair is one round of plain Ray and one of core, in an order that changes from pair to pair. It prints medians, and
the median of the ratios within pairs with its quartiles. Both sides are actors of the same size in the same cluster,
with the same methods.

`simulated` measures only the driver, with thousands of simulated workers. Each has a real control channel, whose other
end is in another process. The driver's time per worker must not depend on the number of workers.
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
# The workers import this file too, as the module bench_core.
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
"""Maximum time of a call through core, relative to plain Ray."""
MOST_GROWTH = 1.20
"""Maximum growth of the driver's CPU time per worker from the fewest simulated workers to the most."""
APART_S = 0.00025
"""Seconds between two results of simulated workers that respond one by one."""


class Light(BaseWorkload):
    """A minimal worker."""

    @trainer_invocation
    def nothing(self) -> None: ...

    @trainer_invocation
    def echo(self, array: Any) -> Any:
        return array

    @rpc()
    def length_each(self, batch: Any) -> list[int]:
        time.sleep(4)  # until all parts have been sent, so that `bench_memory` sees all of them
        return [0] * len(batch)

    @rpc()
    def double(self, items: list[int]) -> list[int]:
        return [2 * item for item in items]


class PlainLight:
    """The same methods for plain Ray."""

    def nothing(self) -> None: ...

    def echo(self, array: Any) -> Any:
        return array

    def double(self, items: list[int]) -> list[int]:
        return [2 * item for item in items]


def light_job(count: int) -> Job:
    """Return a job with `count` light workers."""
    builder = JobBuilder().device_type("CPU")
    builder.role("light").run("bench_core:Light").total(count).resource(cpu=0.01)
    return builder.build()


@contextlib.contextmanager
def plain_actors(count: int) -> Iterator[list[Any]]:
    """Start `count` actors of plain Ray, and wait until each has responded once. Kill them at the end."""
    import ray

    actor: Any = ray.remote(PlainLight)
    actors = [actor.options(num_cpus=0.01).remote() for _ in range(count)]
    ray.get([actor.nothing.remote() for actor in actors])
    yield actors
    for actor in actors:
        ray.kill(actor)


@contextlib.contextmanager
def both_sides(count: int, plain: bool = True) -> Iterator[tuple[RoleGroup[Any], list[Any]]]:
    """Yield a role group of `count` workers and a list of as many plain actors, or none without `plain`."""
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
    """Print a row: medians per call, the driver's CPU time per call, and the ratio within pairs. Return its median.

    `undo` runs after each side and is not measured.
    """
    pairs: list[dict[str, tuple[float, float]]] = []
    for index in range(rounds + 1):
        pair = {}
        sides = [("plain", plain), ("core", ours)]
        # In turns, so that a machine that becomes slower affects both sides equally.
        if index % 2 == 0:
            sides.reverse()
        for side, work in sides:
            began = time.perf_counter()
            cpu = time.process_time()
            work()
            pair[side] = ((time.perf_counter() - began) / calls, (time.process_time() - cpu) / calls)
            undo()
        pairs.append(pair)
    pairs = pairs[1:]  # the first pair is a warm-up
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
    """Print the head of a table."""
    print(f"\n{title}\n\n| | plain Ray, ms | core, ms | ratio (quartiles) | difference, ms | driver CPU | core's |")
    print("|---|---|---|---|---|---|---|")


def bench_start(options: argparse.Namespace) -> None:
    """Time from nothing to workers that have responded. On both sides it is nearly all process start."""
    head("Start of a light class, per worker")
    for count in options.workers:
        started = contextlib.ExitStack()

        def plainly(count: int = count, started: contextlib.ExitStack = started) -> None:
            started.enter_context(plain_actors(count))

        def ours(count: int = count, started: contextlib.ExitStack = started) -> None:
            started.enter_context(light_job(count).running("bench"))
            RoleGroup[Any]("light").call("nothing").result()

        # Fewer rounds for many workers, because each pair starts 2 * count processes.
        rounds = max(2, options.rounds // (1 + count // 4))
        compare(f"{count} workers", plainly, ours, rounds, count, started.close)


def bench_calls(options: argparse.Namespace) -> None:
    """Calls without payload to two workers."""
    import ray

    head("Calls without payload to 2 workers, 200 one after the other")
    with both_sides(2) as (group, plain):

        def plainly() -> None:
            for _ in range(200):
                ray.get([actor.nothing.remote() for actor in plain])

        def ours() -> None:
            for _ in range(200):
                group.nothing()

        compare("`RG.nothing()`", plainly, ours, options.rounds, 200)


def bench_payload(options: argparse.Namespace) -> None:
    """Arrays of 4 MB and 64 MB of float32, to the workers and back."""
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

            compare(f"{megabytes} MB", plainly, ours, options.rounds)


def bench_flight(options: argparse.Namespace) -> None:
    """1,000 calls in flight at once."""
    import ray

    head("1,000 small calls in flight to 2 workers, per call")
    with both_sides(2) as (group, plain):

        def plainly() -> None:
            ray.get([actor.nothing.remote() for _ in range(500) for actor in plain])

        def ours() -> None:
            for future in [group.call("nothing") for _ in range(500)]:
                future.result()

        compare("`group.call(...)`, then all results", plainly, ours, options.rounds, 1000)


def bench_fanout(options: argparse.Namespace) -> None:
    """Time per worker as the group grows.

    Both sides call the same processes. Plain Ray calls a method of the actor that takes no argument and returns two
    words. Twice as many idle Ray processes would be a load by themselves.
    """
    import ray

    head("One call to all workers of a light class, per worker")
    ratios: dict[int, float] = {}
    with both_sides(max(options.workers), plain=False) as (group, _):
        members = group._entry.members
        for count in options.workers:
            group._entry.members = members[:count]
            times = max(2, 64 // count)

            def plainly(count: int = count, times: int = times) -> None:
                for _ in range(times):
                    ray.get([member.handle.doing.remote() for member in members[:count]])

            def ours(times: int = times) -> None:
                for _ in range(times):
                    group.nothing()

            ratios[count] = compare(f"{count} workers", plainly, ours, options.rounds, times * count)
        group._entry.members = members
    most = max(ratios, key=lambda count: ratios[count])
    print(f"\nThe largest ratio is {ratios[most]:.2f}, of {most} workers; the limit is {MOST_BESIDE_RAY:.2f}.")


def bench_sequence(options: argparse.Namespace) -> None:
    """Iteration over a FutureSequence of 100,000 items."""
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

        compare("`for item in sequence`", plainly, ours, options.rounds)


def bench_memory(_: argparse.Namespace) -> None:
    """Memory in the object store while 1 GB is sent in parts to 4 workers."""
    import torch

    from components.batch import Batch

    print("\n1 GB split over 4 workers: bytes in the object store, which holds every copy made while sending\n")
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
    """Return the bytes in use in the local object store."""
    import ray
    from ray._private.internal_api import memory_summary

    text = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    usage = next(row for row in text.splitlines() if row.startswith("Plasma memory usage"))
    return int(float(usage.split()[3]) * 2**20)


# --- simulated workers


class Answer:
    """A reference: the value, and the time on the monotonic clock at which it is available."""

    __slots__ = ("at", "value")

    def __init__(self, value: Any, at: float) -> None:
        self.value = value
        self.at = at


class SimulatedTransport(Transport):
    """A transport as in core/members.py. Results are available at once, or one by one every `apart_s` seconds."""

    def __init__(self, apart_s: float) -> None:
        self._apart_s = apart_s
        self._last = 0.0

    def answer(self, value: Any) -> Answer:
        """Return a reference to a result."""
        # Never in the past: after a pause the results do not all arrive at once.
        self._last = max(time.monotonic(), self._last + self._apart_s)
        return Answer(value, self._last)

    def send(self, member: Member, export: Export, share: Share) -> Answer:
        """Return a reference to None, whatever the method."""
        del member, export, share
        return self.answer(None)

    def put(self, value: Any) -> Any:
        """Return the value: there is no object store."""
        return value

    def wait(self, references: Sequence[Answer], timeout: float | None, count: int = 1) -> list[Answer]:
        """Return the available references, once there are `count` of them, or after `timeout` seconds."""
        if references and timeout != 0:
            ready_at = sorted(reference.at for reference in references)[min(count, len(references)) - 1]
            left = ready_at - time.monotonic()
            if timeout is not None:
                left = min(left, timeout)
            time.sleep(max(0.0, left))
        now = time.monotonic()
        return [reference for reference in references if reference.at <= now]

    def values(self, references: Sequence[Answer]) -> list[Any] | None:
        """Return all values if they are available within 20 ms, else None."""
        if len(self.wait(references, 0.02, len(references))) < len(references):
            return None
        return [reference.value for reference in references]

    def outcome(self, reference: Answer) -> Outcome:
        """Return the value as a successful outcome: nothing fails here."""
        return Outcome(reference.value)


class SimulatedBackend:
    """A backend for core/supervise without processes. The handle of a process is its specification.

    `channels` has the other ends of the control channels. None: there are no channels.
    """

    is_local = False

    def __init__(self, apart_s: float = 0.0, channels: Channels | None = None) -> None:
        self.transport = SimulatedTransport(apart_s)
        self._channels = channels
        self._address: Any = None
        self._exports = {export.name: export for value in vars(Light).values() if (export := export_of(value))}

    def start(self, placement: Any, placement_timeout: float, info: Any) -> None:
        """Do nothing: there is room for all workers."""

    def create(self, spec: ProcessSpec) -> ProcessSpec:
        """Return the specification as the handle: no process is started."""
        if self._channels is not None and self._address is None:
            self._address = self._channels.listen(spec.run.key)
        return spec

    def invoke(self, handle: ProcessSpec, method: str, *args: Any) -> Answer:
        """Return a reference to the result that a worker process would return."""
        del args
        value: Any = None
        if method == "report":
            # An address of another machine, so that the driver sends no signal to a process of this one.
            value = ProcessReport("10.0.0.1", "simulated", 0, node="simulated", control=self._address)
        elif method == "construct":
            value = {role: Made(dict(self._exports), "bench_core.Light", False) for role in handle.roles}
        return self.transport.answer(value)

    def pickled(self, value: Any) -> Any:
        """Return the value: it leaves no process."""
        return value

    def kill(self, handle: ProcessSpec) -> None:
        """End all channels when the first worker is killed."""
        del handle
        if self._channels is not None and self._address is not None:
            self._address = None
            self._channels.hang_up()

    def release(self) -> None:
        """Do nothing: no resources were reserved."""

    def stop(self) -> None:
        """Do nothing: no process was started."""

    def fault(self) -> str:
        """Return "": no worker can die."""
        return ""

    def dead_nodes(self) -> set[str]:
        """Return an empty set."""
        return set()

    def room_missing(self) -> str:
        """Return "": no resource is missing."""
        return ""


def other_ends(orders: Connection) -> None:
    """Serve the other ends of the control channels, of one run after the other. Runs in a separate process.

    It receives the key of a run and sends the address back. The next message ends the channels of that run.
    """
    while True:
        with Listener(("127.0.0.1", 0), backlog=1000, authkey=orders.recv()) as listener:
            orders.send(listener.address)
            ends: list[Connection] = []
            # In a thread, because thousands of workers connect while others already expect replies.
            threading.Thread(target=_let_in, args=(listener, ends), daemon=True).start()
            while not orders.poll():
                for end in wait(list(ends), 0.1):
                    assert isinstance(end, Connection)
                    _answer(end, ends)
            orders.recv()
            for end in ends:
                end.close()


def _let_in(listener: Listener, ends: list[Connection]) -> None:
    with contextlib.suppress(OSError):  # raised when the listener is closed
        while True:
            ends.append(listener.accept())


def _answer(end: Connection, ends: list[Connection]) -> None:
    try:
        kind, *_ = end.recv()
        reply: Any = True
        if kind == "status":
            reply = Status(IDLE, 0.0, 0.0, 50 * 2**20)
        end.send((kind, reply))
    except (EOFError, OSError):  # the driver has closed the channel
        ends.remove(end)


class Channels:
    """The driver's side of `other_ends`."""

    def __init__(self) -> None:
        self._orders, other_side = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=other_ends, args=(other_side,), daemon=True)
        self._process.start()

    def listen(self, key: bytes) -> Any:
        """Start the other ends of a run with this key. Return their address."""
        self._orders.send(key)
        return self._orders.recv()

    def hang_up(self) -> None:
        """End all channels of the run."""
        self._orders.send(None)

    def close(self) -> None:
        """End the process."""
        self._process.kill()


@contextlib.contextmanager
def simulated(backend: SimulatedBackend) -> Iterator[None]:
    """Context in which the workers of every job are simulated."""
    real = master.make_backend
    master.make_backend = lambda *_: backend
    try:
        yield
    finally:
        master.make_backend = real


def driver_seconds(count: int, backend: SimulatedBackend, calls: int, idle_s: int = 0) -> dict[str, float]:
    """Return the driver's CPU seconds per worker for the plan, the start, one call to all, and the end.

    With `idle_s` also for a second without calls. Python's garbage collector is off: a full pass visits all objects,
    and it would be chance whether one falls into a measured part.
    """
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def counted(name: str, times: int = 1) -> Iterator[None]:
        began = time.process_time()
        yield
        seconds[name] = (time.process_time() - began) / count / times

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


def bench_simulated(options: argparse.Namespace) -> None:
    """Print the driver's CPU time per worker for growing numbers of workers, the minimum of three runs."""
    print("\nCPU time of the driver per simulated worker, in microseconds")
    channels = Channels()
    print("\nWith control channels; results are available at once\n")
    table_of_driver(options.simulated, lambda: SimulatedBackend(channels=channels), idle_s=1)
    channels.close()
    print(f"\nWithout control channels; results are {1e3 * APART_S:g} ms apart\n")
    table_of_driver(options.simulated, lambda: SimulatedBackend(APART_S))


def table_of_driver(counts: Sequence[int], backend: Callable[[], SimulatedBackend], idle_s: int = 0) -> None:
    """Print a row per number of workers, and the growth per worker from the fewest to the most."""
    least: dict[int, dict[str, float]] = {}
    for count in sorted(counts):
        calls = max(1, 2000 // count)
        runs = [driver_seconds(count, backend(), calls, idle_s) for _ in range(3)]
        least[count] = {name: min(run[name] for run in runs) for name in runs[0]}
        if len(least) == 1:
            print(f"| workers | {' | '.join(least[count])} |\n|---{'|---' * len(least[count])}|")
        cells = " | ".join(f"{1e6 * seconds:.1f}" for seconds in least[count].values())
        print(f"| {count:,} | {cells} |", flush=True)
    fewest = least[min(least)]
    most = least[max(least)]
    cells = " | ".join(f"{most[name] / fewest[name]:.2f}" for name in fewest)
    print(f"| last / first, at most {MOST_GROWTH:.2f} | {cells} |", flush=True)


BENCHES: dict[str, Callable[[argparse.Namespace], None]] = {
    "start": bench_start,
    "calls": bench_calls,
    "payload": bench_payload,
    "flight": bench_flight,
    "fanout": bench_fanout,
    "sequence": bench_sequence,
    "memory": bench_memory,
}


def on_ray(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Run the benchmarks that need Ray in a cluster of their own."""
    import ray

    from core.backends.ray_token import own_token
    from core.shared_memory import shared_folder

    with own_token(shared_folder(f"bench-{os.getpid()}")):
        ray.init(
            address="local", num_cpus=8, include_dashboard=False, object_store_memory=4 * 2**30, log_to_driver=False
        )
        print(f"ray {ray.__version__}, {options.rounds} pairs each")
        for name in names:
            BENCHES[name](options)


def main() -> None:
    """Run the selected benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "benches", nargs="*", choices=["simulated", *BENCHES, []], help="benchmarks to run (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=21, help="number of pairs per row")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="numbers of real workers")
    parser.add_argument("--simulated", type=int, nargs="+", default=SIMULATED, help="numbers of simulated workers")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    # The default of Ray is 15, with which any other process of the machine would slow the workers down.
    os.environ.setdefault("RAY_worker_niceness", "0")
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    names = options.benches or ["simulated", *BENCHES]
    if "simulated" in names:
        bench_simulated(options)
    if others := [name for name in names if name != "simulated"]:
        on_ray(options, others)


if __name__ == "__main__":
    main()
