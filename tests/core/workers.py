"""Small workloads for the tests of core."""

import asyncio
import functools
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from core import (
    BaseTrainer,
    BaseWorkload,
    Dispatch,
    Role,
    RoleGroup,
    info,
    nd_compute,
    register,
    rpc,
    trainer_invocation,
)
from core.context import current


def whole(values: list[Any]) -> list[Any]:
    """Call every worker with the same arguments."""
    return RoleGroup("ACTOR").call(whole, values).result()


def doubled(values: list[int]) -> Any:
    """Split the values over the workers, each of which doubles its chunk."""
    return RoleGroup("ACTOR").call_batch(doubled, len(values), values)


def first_only() -> int:
    """Call rank 0 only."""
    return RoleGroup("ACTOR").call_rank0(first_only).result()


class Plus:
    """A callable object that is not a function."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, values: list[int]) -> list[int]:
        return [value + self.number for value in values]


@rpc("of_module")
def in_the_workloads_module() -> int:
    return 3


@rpc
def doubled_in_the_workloads_module(value: int) -> int:
    return 2 * value


@rpc
async def doubled_later_in_the_workloads_module(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


@rpc("from_outside", export=True)
def outside_of_any_class(value: int) -> int:
    return value + 100


HELD_S = 0.3


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true, without a limit."""
    while not condition():
        time.sleep(0.01)


class KeywordsOnly(Exception):
    """An exception that cannot be unpickled, because its constructor takes keyword arguments only."""

    def __init__(self, *, done: int, of: int) -> None:
        super().__init__(f"{done} of {of}")


class Echo(BaseWorkload):
    """A workload whose methods return their arguments."""

    @trainer_invocation
    def echo(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (self.rank, *args, *kwargs.values())

    @trainer_invocation(idempotent=True)
    def echo_alone(self, values: list[int]) -> tuple[Any, ...]:
        """Return the values. The call is idempotent, so it enters no collective."""
        return (self.rank, values)

    @trainer_invocation(target="RANK0")
    def warn(self, text: str) -> None:
        logging.getLogger("my.code").warning(text)
        logging.getLogger("my.code").info("not for the terminal")

    @trainer_invocation
    def count(self, values: list[int]) -> int:
        return len(values)

    @trainer_invocation(target="RANK0")
    def echo_rank0(self, value: Any) -> Any:
        return value

    @trainer_invocation(auto_shard=False)
    def echo_whole(self, value: Any) -> Any:
        return value

    @trainer_invocation(blocking=False)
    def slow(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @trainer_invocation(blocking=False)
    def held(self, gate: Path) -> int:
        """Wait until the gate exists, and at least HELD_S seconds."""
        time.sleep(HELD_S)
        wait_for(gate.exists)
        return self.rank

    @trainer_invocation(is_async=True, timeout=HELD_S / 2)
    def held_on_rank1(self, gate: Path) -> int:
        if self.rank == 1:
            self.held(gate)
        return self.rank

    @trainer_invocation(blocking=False)
    def meet(self, folder: Path, count: int) -> int:
        """Return once `count` workers are in this method at the same time."""
        (folder / self.name).touch()
        wait_for(lambda: len(list(folder.iterdir())) == count)
        return self.rank

    @trainer_invocation(is_async=True, timeout=60)
    def quick(self) -> int:
        return self.rank

    @trainer_invocation(pre_func=lambda x: max(x, 0), post_func=sum)
    def not_negative(self, value: int) -> int:
        return value

    @trainer_invocation(pre_func=Plus(1), post_func=functools.partial(max, default=0))
    def largest_plus_one(self, values: list[int]) -> int:
        return max(values)

    @trainer_invocation(pre_func=lambda x: ((x,), {}))
    def prepared_as_dlrover_does(self, value: int) -> int:
        return value

    @trainer_invocation(pre_func=lambda a, b: (b, a))
    def swapped(self, first: Any, second: Any) -> tuple[Any, Any]:
        return first, second

    @trainer_invocation
    def writable(self, array: Any) -> bool:
        return bool(array.flags.writeable)

    @trainer_invocation
    def kinds(self, value: Any) -> str:
        size = len(value) if hasattr(value, "__len__") else value
        return f"{type(value).__name__}:{size}"

    @trainer_invocation(target="RANK0")
    def ask(self, role: str, value: Any) -> Any:
        """Call another role from inside a workload, by a method of the group and by name."""
        group = RoleGroup(role)
        return group.echo([value, value, value]), group.call("echo", value).result()

    @trainer_invocation(target="RANK0")
    async def ask_async(self, role: str, value: Any) -> Any:
        """Await the results of another role from inside an async method."""
        group = RoleGroup(role)
        results = group.call("echo", value)
        first_result = group.call_rank0("echo", value)
        return await results, await first_result, (await group.call("name_later", 0.0))[:1]

    @trainer_invocation(target="RANK0")
    def identity_around_a_call_to(self, role: str) -> list[str]:
        """Return the name of the current workload before and after a call to another role."""
        before = current().identity.name
        RoleGroup(role).echo(1)
        return [before, current().identity.name]

    @rpc()
    async def name_later(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return self.name

    @trainer_invocation(blocking=False)
    async def met(self, count: int) -> int:
        """Return once `count` calls are in this method at the same time."""
        self.inside = getattr(self, "inside", 0) + 1
        while self.inside < count:
            await asyncio.sleep(0.01)
        return self.inside

    @trainer_invocation
    def leave(self, code: Any) -> None:
        sys.exit(code)

    @rpc()
    def with_names(self, first: int, *, second: int) -> tuple[int, int]:
        return first, second

    @trainer_invocation
    def fail(self, rank: int) -> int:
        if self.rank >= rank:
            raise KeyError(f"lost in rank {self.rank}")
        return self.rank

    @trainer_invocation
    def die(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    @trainer_invocation
    def identity(self) -> tuple[Any, ...]:
        return (
            self.role,
            self.rank,
            self.world_size,
            self.local_rank,
            self.torch_master_port,
            os.environ["OMP_NUM_THREADS"],
            os.environ.get("COLOUR"),
            os.environ.get("MASTER_PORT"),
            (os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT")),
            os.environ.get("RANK"),
            os.environ.get("WORLD_SIZE"),
        )

    @rpc(whole)
    def _whole(self, values: list[Any]) -> list[Any]:
        return values

    @rpc(doubled)
    def _doubled(self, values: list[int]) -> list[int]:
        return [2 * value for value in values]

    @rpc()
    def held_each(self, gates: list[Path]) -> list[str]:
        for gate in gates:
            wait_for(gate.exists)
        return [gate.name for gate in gates]

    @rpc()
    def too_many(self, values: list[int]) -> list[int]:
        return [*values, 0]

    @rpc()
    def talk(self, lines: int) -> int:
        for number in range(lines):
            self.info(f"line {number}")
        return lines

    @rpc()
    def fail_oddly(self) -> NoReturn:
        raise KeywordsOnly(done=7, of=8)

    @rpc(first_only)
    def _first_only(self) -> int:
        return 10 + self.rank

    def undecorated(self, values: list[int]) -> tuple[int, list[int]]:
        """Return the values. This method has no decorator."""
        return self.rank, values

    def _private(self) -> None:
        """Do nothing. This method has no decorator and is private."""


class Script(BaseTrainer):
    """Trainer that runs the function in the configuration."""

    def init(self) -> None:
        info(f"hello from {self.name}")

    def fit(self) -> None:
        self.config(self)


class Plain:
    """A class without a base class, with an exported method and a run()."""

    @rpc()
    def answer(self) -> int:
        return 42

    def run(self) -> None:
        info("plain ran")


class FailsAtStart(BaseWorkload):
    """A workload whose setup() raises."""

    def setup(self) -> NoReturn:
        raise RuntimeError("no such model")


def stub_with_two(a: int, b: int) -> None:
    """Stub with other parameters than its implementation."""


class WrongStub(BaseWorkload):
    """A workload whose method has other parameters than its stub."""

    @rpc(stub_with_two)
    def method(self, a: int) -> None:
        """Take one argument."""


class Grid(BaseWorkload):
    """Methods with each dispatch mode. Four workers form a mesh of two data-parallel ranks with two peers each."""

    def setup(self) -> None:
        if self.role == Role("mesh"):
            self.register_mesh("dp", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def everybody(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (self.rank, *args, *kwargs.values())

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first(self, value: Any) -> tuple[int, Any]:
        return (self.rank, value)

    @register()
    def each(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (self.rank, *args, *kwargs.values())

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def each_too(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, values: Any, other: Any = 0) -> Any:
        if isinstance(values, list):
            if not isinstance(other, list):
                other = [other] * len(values)
            return [a + b for a, b in zip(values, other, strict=True)]
        return values + other

    @register(dispatch_mode=nd_compute("dp"))
    def on_mesh(self, values: list[int]) -> list[tuple[int, int]]:
        return [(self.rank, value) for value in values]

    @register(dispatch_mode=nd_compute("dp"), blocking=False)
    def on_mesh_later(self, values: list[int]) -> list[int]:
        return [10 * value for value in values]

    @register(dispatch_mode=nd_compute("unknown"))
    def on_no_mesh(self, values: list[int]) -> list[int]:
        return values

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, values: Any) -> Any:
        return [value + 1 for value in values]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def same(self, values: Any) -> Any:
        return values

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def later_async(self, values: list[int]) -> list[int]:
        await asyncio.sleep(0.01)
        return [value + 1 for value in values]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def register_again(self) -> None:
        self.register_mesh("dp", 0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def where(self, values: Any) -> list[tuple[int, list[Any]]]:
        return [(self.rank, list(values))] * len(values)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole_length(self, values: Any) -> int:
        return len(values)

    def first_again(self, value: int) -> int:
        """Return the value. This method has no decorator."""
        return value

    @property
    def not_a_method(self) -> int:
        """A property, which cannot be called."""
        return 1


class Stacked(BaseWorkload):
    """A workload of one of two roles that share processes, rank by rank."""

    @trainer_invocation
    def ask_all(self, texts: list[str]) -> list[Any]:
        return RoleGroup("LOWER").call("answer", texts).result()

    @trainer_invocation
    def ask_same_rank(self) -> list[str]:
        return RoleGroup("LOWER").on(self.rank).call("own_name").result()

    @rpc()
    def answer(self, texts: list[str]) -> list[str]:
        time.sleep(HELD_S)  # long enough for both calling ranks to wait at the same time
        return [f"{self.name}: {text}" for text in texts]

    @rpc()
    def own_name(self) -> str:
        return self.name


class Settings(BaseWorkload):
    """A workload that changes process-wide state of the libraries."""

    def setup(self) -> None:
        self.notes: list[int] = []

    @trainer_invocation
    def change(self, seed: int) -> list[float]:
        import torch

        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the test is about the process-wide generator
        if self.role == Role("a"):
            torch.set_default_dtype(torch.float64)
            os.environ["MINE"] = "a"
        return self.draw()

    @trainer_invocation
    def draw(self) -> list[float]:
        import torch

        return [random.random(), float(torch.rand((), dtype=torch.float32)), float(np.random.rand())]  # noqa: NPY002

    @trainer_invocation
    def look(self) -> tuple[Any, ...]:
        import torch

        return os.environ.get("COLOUR"), str(torch.get_default_dtype()), os.environ.get("MINE")

    @rpc()
    def note(self, number: int) -> list[int]:
        self.notes.append(number)
        return self.notes


class Stops(BaseWorkload):
    """A workload with a breakpoint."""

    @trainer_invocation(is_async=True, timeout=0.1)
    def stop_and_take_long(self) -> int:
        breakpoint()  # noqa: T100 - the subject of the test
        time.sleep(0.2)
        return 1


class Grouped(BaseWorkload):
    """A workload that creates the process group of its ranks, as an engine does."""

    def setup(self) -> None:
        import torch.distributed as dist

        if self.torch_master_port > 0:
            self.setup_process_group(lambda: dist.init_process_group("gloo"))

    @rpc()
    def sum_of_ranks(self) -> int | None:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            return None
        total = torch.tensor(self.rank)
        dist.all_reduce(total)
        return int(total)


class Where(BaseWorkload):
    """A workload that returns its placement."""

    @rpc()
    def place(self) -> dict[str, Any]:
        import ray

        return {
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "master": f"{self.torch_master_addr}:{self.torch_master_port}",
        }


class Place(Grouped, Where):
    """A workload that returns its placement and creates a process group."""
