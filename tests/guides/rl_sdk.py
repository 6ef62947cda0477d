"""Program in the form of the guide "Reinforcement Learning Integration": roles, a trainer, every row of its tables."""

import json
import os
import time
from pathlib import Path
from typing import Any

import ray

from core import BaseTrainer, BaseWorkload, RLRoleType, trainer_invocation


def filter_func(input: int) -> int:
    if input < -1:
        return 0
    return input


def plus_hundred(results: list[int]) -> list[int]:
    return [result + 100 for result in results]


class Described(BaseWorkload):
    """Methods that every role of the program has."""

    def describe(self) -> dict[str, Any]:
        return {
            "master_handle": self.__dict__.get("master_handle"),
            "config": dict(self.config),
            "name": self.name,
            "role": self.role.value,
            "rank": self.rank,
            "word_size": self.word_size,  # pyright: ignore[reportAttributeAccessIssue]
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "torch_master_addr": self.torch_master_addr,
            "torch_master_port": self.torch_master_port,
            "predicates": [
                self.is_actor_role(),
                self.is_reference_role(),
                self.is_rollout_role(),
                self.is_reward_role(),
                self.is_critic_role(),
            ],
            "collocation": self.get_device_collocation(),
        }


@ray.remote
class UserActorModel(Described):
    """Step 1 of the guide, with its examples of @trainer_invocation."""

    def __init__(self, master_handle: Any, config: Any) -> None:
        super().__init__(master_handle, config)
        self.steps = 0
        self.model = ""

    def init_model(self) -> str:
        self.model = f"model of {self.name}"
        return self.model

    def update_actor(self) -> int:
        self.steps += 1
        return self.steps

    def _private(self) -> int:
        return 0

    def fail(self) -> None:
        raise KeyError("in the actor")

    @trainer_invocation(blocking=False)
    def a(self, value: int) -> int:
        return value + self.rank

    @trainer_invocation(blocking=False, post_func=plus_hundred)
    def a_later(self, value: int) -> int:
        return value + self.rank

    @trainer_invocation(is_async=True, timeout=30)
    def b(self, value: int) -> int:
        return value + self.rank

    @trainer_invocation(is_async=True, timeout=30, pre_function=filter_func)
    def b_filtered(self, input: int) -> int:
        return input + 1

    @trainer_invocation(pre_func=filter_func, post_func=plus_hundred)
    def between(self, input: int) -> int:
        return input + 1

    @trainer_invocation(target="RANK0")
    def first(self, value: list[int]) -> list[int]:
        return value

    @trainer_invocation(auto_shard=False)
    def whole(self, value: list[int]) -> list[int]:
        return value

    @trainer_invocation()
    def update(self, value: list[int]) -> list[int]:
        return value

    @trainer_invocation(is_async=True, timeout=1)
    def late(self, gate: str) -> int:
        while not Path(gate).exists():
            time.sleep(0.02)
        return os.getpid()

    def pid(self) -> int:
        return os.getpid()


@ray.remote
class UserOtherModel(Described):
    """A workload for ROLLOUT, REWARD, REFERENCE and CRITIC."""

    def generate(self, parameter_0: str, parameter_1: str) -> str:
        return f"{parameter_0} {parameter_1} {self.rank}"


class UserTrainer(BaseTrainer):
    """Step 2 of the guide. The results are written to a file."""

    def __init__(self, actor_handles: Any, actor_classes: Any, config: Any) -> None:
        super().__init__(actor_handles, actor_classes, config)
        self.found: dict[str, Any] = {}

    def init(self) -> None:
        self.found["init_model"] = self.RG_ACTOR.init_model()

    def fit(self) -> None:
        self.describe_all()
        self.call_all()
        if self.config["backend"] == "ray":
            self.call_as_ray_does()
            self.call_a_late_worker()
        Path(self.config["out"]).write_text(json.dumps(self.found))

    def describe_all(self) -> None:
        self.found["groups"] = self.get_role_groups()
        self.found["resource"] = self.get_workload_resource(RLRoleType.ACTOR)
        self.found["handles"] = {role.value: len(self.actor_handles[role]) for role in RLRoleType if role != self.role}
        lists = (self.actors, self.references, self.rollouts, self.rewards, self.critics)
        self.found["lists"] = [len(handles) for handles in lists]
        self.found["config"] = self.config["lr"]
        for name in self.get_role_groups():
            self.found[name] = getattr(self, name).describe()

    def call_all(self) -> None:
        actors = self.RG_ACTOR
        self.found["update_actor"] = actors.update_actor()
        self.found["generate"] = self.RG_ROLLOUT.generate("x", "y")
        self.found["a"] = actors.a(1).result()
        self.found["a_later"] = actors.a_later(1).result()
        self.found["b"] = actors.b(1)
        self.found["b_filtered"] = actors.b_filtered(-5)
        self.found["between"] = actors.between(-5)
        self.found["first"] = actors.first([1, 2])
        self.found["whole"] = actors.whole([1, 2])
        self.found["update"] = actors.update([1, 2])
        for name, call in {
            "error": actors.fail,
            "private": lambda: actors._private,
            "typo": lambda: actors.updat_actor,
            "no_role": lambda: self.RG_TOOL,  # pyright: ignore[reportAttributeAccessIssue]
            "master": lambda: self.master_handle,  # pyright: ignore[reportAttributeAccessIssue]
        }.items():
            try:
                call()
            except Exception as error:  # noqa: BLE001 - what is tested
                self.found[name] = [type(error).__name__, str(error)]

    def call_as_ray_does(self) -> None:
        future = self.RG_ACTOR.a(1)
        self.found["get"] = ray.get(future)
        self.found["wait"] = len(ray.wait(self.RG_ACTOR.a(1), num_returns=2)[0])
        self.found["remote"] = ray.get([handle.update_actor.remote() for handle in self.actors])
        self.found["remote_one"] = ray.get(self.actor_handles[RLRoleType.ACTOR][1].update.remote([7]))
        try:
            ray.get(self.actors[0].fail.remote())
        except KeyError as error:
            self.found["remote_error"] = "in the actor" in str(error)

    def call_a_late_worker(self) -> None:
        gate = self.config["out"] + ".gate"
        try:
            self.RG_ACTOR.late(gate)
        except TimeoutError as error:
            self.found["late"] = str(error)
        Path(gate).touch()
        self.found["same_processes"] = self.RG_ACTOR.late(gate) == self.RG_ACTOR.pid()
