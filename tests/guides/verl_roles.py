"""Module `workers` of the guide "Multi-Role Training Example: verl": roles around workers of another library."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import verl_workers

from core import (
    BaseWorkload,
    MyWorkerGroup,  # pyright: ignore[reportAttributeAccessIssue]
    export_verl_worker_rpc,
    notify_job_end,
    rpc,
)


class BaseWorker(BaseWorkload):
    """Exports the methods of the wrapped worker, and runs until the trainer ends the job."""

    core_class: type = verl_workers.CriticWorker

    def setup(self) -> None:
        self.core = self.core_class()
        export_verl_worker_rpc(self.core)
        self.ended = threading.Event()

    def run(self) -> None:
        print("waits for the end", os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
        self.ended.wait()
        Path(self.config["out"], f"{self.name}.ended").touch()

    @rpc
    def job_end(self) -> None:
        self.ended.set()


class ActorWorker(BaseWorker):
    """Policy and reference."""

    core_class = verl_workers.AsyncActorRolloutRefWorker


class CriticWorker(BaseWorker):
    """Value function."""


class RMWorker(BaseWorker):
    """Reward model."""

    core_class = verl_workers.RewardModelWorker


class Trainer:
    """Trainer that calls the other roles."""

    def run(self) -> None:
        self.prepare()
        self.fit()
        notify_job_end("critic", "ref", "rm", "actor_rollout")

    def prepare(self) -> None:
        self.critic_wg = MyWorkerGroup("critic", verl_workers.CriticWorker)
        self.ref_policy_wg = MyWorkerGroup("ref", verl_workers.ActorRolloutRefWorker)
        self.rm_wg = MyWorkerGroup("rm", verl_workers.RewardModelWorker)
        self.actor_rollout_wg = MyWorkerGroup("actor_rollout", verl_workers.AsyncActorRolloutRefWorker)
        async_init = [
            self.critic_wg.call("init_model"),
            self.ref_policy_wg.call("init_model"),
            self.rm_wg.call("init_model"),
        ]
        self.initialised = [it.result() for it in async_init]
        self.actor_rollout_wg.init_model()

    def fit(self) -> None:
        from core.context import current

        texts = self.actor_rollout_wg.generate_sequences(["a", "bc"])
        report: dict[str, Any] = {
            "initialised": self.initialised,
            "texts": texts,
            "scores": self.rm_wg.compute_rm_score(texts),
            "updated": self.critic_wg.update([1, 2]),
            "rank0": self.critic_wg.call_rank0("update", [5]).result(),
        }
        Path(current().config["out"], "found.json").write_text(json.dumps(report))


class Broken(BaseWorker):
    """A role whose run() fails."""

    def run(self) -> None:
        raise KeyError("in run")


class Endless(BaseWorker):
    """A role whose run() ends at the end of the job, although job_end is never called."""

    def run(self) -> None:
        while not self.stop_requested:
            self.ended.wait(0.02)
        Path(self.config["out"], f"{self.name}.ended").touch()


class Waiting:
    """A trainer that calls a worker until the job ends."""

    def run(self) -> None:
        group = MyWorkerGroup("critic")
        for _ in range(self.calls()):
            group.call("init_model").result()

    def calls(self) -> int:
        from core.context import current

        return current().config["calls"]
