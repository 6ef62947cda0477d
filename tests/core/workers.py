"""Workloads for the tests of core: small enough to read, real enough to start."""

import logging
import os
import signal
import threading
import time
from typing import Any, NoReturn

from core import BaseTrainer, BaseWorkload, RoleGroup, rpc, say, trainer_invocation


def whole(values: list[Any]) -> list[Any]:
    """Stub: everybody gets the same."""
    return RoleGroup("ACTOR").call(whole, values).result()


def doubled(values: list[int]) -> Any:
    """Stub: each worker doubles its part."""
    return RoleGroup("ACTOR").call_batch(doubled, len(values), values)


def first_only() -> int:
    """Stub: only rank 0."""
    return RoleGroup("ACTOR").call_rank0(first_only).result()


class Echo(BaseWorkload):
    """Answers with what it got."""

    @trainer_invocation
    def echo(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (self.rank, *args, *kwargs.values())

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

    @trainer_invocation(is_async=True, timeout=0.5)
    def slow_on_rank1(self) -> int:
        time.sleep(5.0 if self.rank == 1 else 0.0)
        return self.rank

    @trainer_invocation(pre_func=lambda x: max(x, 0), post_func=sum)
    def not_negative(self, value: int) -> int:
        return value

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
    def die_soon(self, rank: int) -> None:
        if self.rank == rank:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

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
        )

    @rpc(whole)
    def _whole(self, values: list[Any]) -> list[Any]:
        return values

    @rpc(doubled)
    def _doubled(self, values: list[int]) -> list[int]:
        return [2 * value for value in values]

    @rpc(first_only)
    def _first_only(self) -> int:
        return 10 + self.rank

    def hidden(self) -> None:
        """Neither decorated nor bound."""


class Script(BaseTrainer):
    """Runs the function that the test put into the configuration."""

    def init(self) -> None:
        say(f"hello from {self.name}")

    def fit(self) -> None:
        self.config(self)


class Plain:
    """No base class: an exported method and a run()."""

    @rpc()
    def answer(self) -> int:
        return 42

    def run(self) -> None:
        say("plain ran")


class FailsAtStart(BaseWorkload):
    """Cannot be set up."""

    def setup(self) -> NoReturn:
        raise RuntimeError("no such model")


def stub_with_two(a: int, b: int) -> None:
    """Stub that its implementation does not fit."""


class WrongStub(BaseWorkload):
    """Its method takes other parameters than its stub."""

    @rpc(stub_with_two)
    def method(self, a: int) -> None:
        """Takes one."""
