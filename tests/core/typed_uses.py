"""Correct uses of groups. test_typing.py checks that pyright reports nothing here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, assert_type

from core import (
    BaseTrainer,
    BaseWorkload,
    Dispatch,
    Future,
    FutureSequence,
    Member,
    Role,
    RoleGroup,
    WorkerGroup,
    nd_compute,
    register,
    rpc,
    trainer_invocation,
)


@dataclass
class Options:
    """Options of the job."""

    rate: float = 0.1


C = TypeVar("C", bound=Options)


def publish(version: int, *, digests: bool = False) -> Future[list[str]]:
    """Call every worker."""
    return RoleGroup(Role.ACTOR).call(publish, version, digests=digests)


def score(texts: list[str], limit: int) -> FutureSequence[float]:
    """Split the texts over the workers."""
    return RoleGroup(Role.ACTOR).call_batch(score, len(texts), texts, limit)


def largest(answers: Sequence[int]) -> float:
    """Return the largest result."""
    return float(max(answers))


def halves(both: str) -> tuple[str, str]:
    """Split one argument into two."""
    first, _, second = both.partition(",")
    return first, second


class Model(BaseWorkload, Generic[C]):
    """A generic base class whose subclass sets the type of the options."""

    config: C

    @trainer_invocation
    def update(self, batch: list[int], step: int = 0) -> dict[str, float]:
        assert_type(self.load("model"), object)  # the method itself, not the call of a group
        return {"rate": self.config.rate, "loss": self.count(batch) / (1 + step)}

    @trainer_invocation(blocking=False, idempotent=True, replay="last")
    def load(self, path: str) -> object:
        return path

    @trainer_invocation(target="RANK0", is_async=True, timeout=60)
    def version(self) -> int:
        return 1

    @trainer_invocation(target="RANK0", blocking=False)
    def version_later(self) -> int:
        return self.version()

    @trainer_invocation(target="ALL", auto_shard=False, post_func=largest)
    def count(self, batch: list[int]) -> int:
        return len(batch)

    @trainer_invocation(blocking=False, post_func=largest)
    def count_later(self, batch: list[int]) -> int:
        return self.count(batch)

    @trainer_invocation(target="RANK0", post_func=lambda answers: answers[0])
    def first(self, name: str) -> list[str]:
        return [name]

    @trainer_invocation(pre_func=halves)
    def joined(self, first: str, second: str) -> str:
        return first + second

    @rpc(publish)
    def publish(self, version: int, *, digests: bool = False) -> str:
        return f"{version} {digests} {self.inner()}"

    def inner(self) -> str:
        """A method without a decorator."""
        return self.name


class Actor(Model[Options]):
    """The workers of a role."""

    @trainer_invocation(blocking=False, idempotent=True, replay="last")
    def load(self, path: str, steps: int = 1) -> object:
        return super().load(path), steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, idempotent=True)
    def begin(self, seed: int) -> str:
        return f"{seed}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def begin_later(self, seed: int) -> str:
        return self.begin(seed)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def seed(self) -> int:
        return 1

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: list[int]) -> list[int]:
        return [2 * item for item in batch]

    @register(dispatch_mode=nd_compute("actor"), blocking=False)
    def double_later(self, batch: list[int]) -> list[int]:
        return self.double(batch)

    @register()
    def each(self, item: int) -> int:
        return item


class Critic(Model[Options]):
    """The workers of another role."""

    alike: type[Model[Any]] = Actor
    """An attribute whose value is a class, and not a group."""


class Trainer(BaseTrainer):
    """A trainer that calls both roles."""

    RG_ACTOR: RoleGroup[Actor]
    actor_wg: WorkerGroup[Actor]
    critic_wg: WorkerGroup[Critic] | None

    def init(self) -> None:
        self.actor_wg = WorkerGroup("actor", Actor)
        self.critic_wg = WorkerGroup("critic", Critic) if "critic" in self.actor_handles else None
        self.RG_CRITIC.whatever(1)  # not declared here, and not checked
        names = [member.name for member in self.RG_ACTOR]
        assert_type(names, list[str])
        assert_type((len(self.RG_ACTOR), self.actor_wg.world_size), tuple[int, int])
        first: Member = self.RG_ACTOR[0]
        self.info(first.name)

    def fit(self) -> None:
        assert_type(self.RG_ACTOR.update([1, 2]), list[dict[str, float]])
        assert_type(self.RG_ACTOR.update(batch=[1, 2], step=3), list[dict[str, float]])
        assert_type(self.RG_ACTOR.on(1).update([1, 2]), list[dict[str, float]])
        assert_type(self.RG_ACTOR.load("model", steps=3).result(), list[object])
        assert_type(self.RG_ACTOR.version(), int)
        assert_type(self.RG_ACTOR.version_later(), Future[int])
        assert_type(self.RG_ACTOR.count([1, 2]), float)
        assert_type(self.RG_ACTOR.count_later([1, 2]).result(), float)
        assert_type(self.RG_ACTOR.first("a"), Any)
        assert_type(self.RG_ACTOR.joined("a,b"), Any)
        self.pass_on(self.RG_ACTOR, self.actor_wg, self.RG_ACTOR.update)

    def call_stubs(self) -> None:
        """Call stubs directly and through the group."""
        assert_type(publish(1, digests=True).result(), list[str])
        assert_type(list(score(["a"], 3)), list[float])
        self.RG_ACTOR.call(publish, 1).result()
        self.RG_ACTOR.call_rank0("publish", 1).result()
        self.RG_ACTOR.call_batch(score, 1, ["a"], limit=3).result()

    def call_worker_groups(self) -> None:
        """Call registered methods, whose dispatch mode gives the return type."""
        assert_type(self.actor_wg.begin(7), list[str])
        assert_type(self.actor_wg.begin_later(7), Future[list[str]])
        assert_type(self.actor_wg.seed(), int)
        assert_type(self.actor_wg.double([1]), list[int])
        assert_type(self.actor_wg.double_later([1]), Future[list[int]])
        assert_type(self.actor_wg.each([1, 2]), Any)
        self.actor_wg.call("begin", 7).result()
        if self.critic_wg is not None:
            assert_type(self.critic_wg.alike, type[Model[Any]])

    def pass_on(
        self,
        group: RoleGroup[Actor],
        workers: WorkerGroup[Actor],
        update: Callable[[list[int]], list[dict[str, float]]],
    ) -> None:
        """Call a method of a group that was passed as an argument, where it is not checked."""
        assert_type(group.whatever(1), Any)
        self.kept = Keeper(workers).group.double([1])
        update([1])


class Keeper:
    """A class of any kind that declares a group."""

    group: WorkerGroup[Actor]

    def __init__(self, group: WorkerGroup[Actor]) -> None:
        self.group = group
