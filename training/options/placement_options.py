"""Options that say which role runs on which devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from components.ranges import Count
from training.options.schema import Options


@dataclass(kw_only=True)
class PlacementOptions(Options, group="placement"):
    """Workers and devices of each role. Without a GPU every worker is a process on the CPU."""

    nodes: Count = 1
    """Machines that the run uses."""
    devices_per_node: Count | None = None
    """Devices of each machine that the run uses; without GPUs processes. Default: all of its GPUs."""
    colocate: bool = True
    """The roles share the devices, and work one after the other. Otherwise each has its own, and what can work at the
    same time does."""
    actor_nodes: Count | None = None
    """Machines over which the ranks of the policy are spread, where the other roles are on the rest. Default: all."""
    actor_ranks: Count | None = None
    """Processes that train the policy, on all machines. Default: one per GPU that is theirs, 1 without GPUs."""
    rollout_engines: Count | None = None
    """Engines that sample. Default: one for each rollout.tensor_parallel GPUs that are theirs, which are those of the
    actor where they share GPUs."""
    references: Count | None = None
    """Instances of the frozen policy, where there is a KL. Default: as for the engines."""
    frozen_models: Literal["whole", "sharded", "offloaded"] = "whole"
    """Reference and reward models: `whole` in each of their processes, which are replaced when they are lost; `sharded`
    over these, which gather a layer for each pass over it, and all starts again when one is lost; or `offloaded`:
    sharded, and in host memory but for the layer at work."""
    engines_sleep: bool | None = None
    """The engines give a GPU's memory back while the policy trains. Default: where vllm shares GPUs with it."""
    learners_sleep: bool = False
    """What trains, actor and critic, waits in host memory while responses are generated."""

    @property
    def shares_devices(self) -> bool:
        """Whether the engines share their devices with other roles."""
        return self.colocate

    def with_sleep(self, gpus: int, engine: str) -> Self:
        """With `engines_sleep` filled in: they do where that gives memory of a GPU to those that train."""
        if self.engines_sleep is not None:
            return self
        return replace(self, engines_sleep=gpus > 0 and engine == "vllm" and self.colocate)

    def resolved(self, gpus: int, groups: int, tensor_parallel: int = 1) -> PlacementOptions:
        """With every number filled in that was left to the machine.

        Args:
            gpus: of each machine.
            groups: roles that hold the policy: 2, or with a reference 3.
            tensor_parallel: devices of an engine.

        Raises:
            ValueError: they cannot be laid out; the message says what to set.
        """
        spread = self.actor_nodes or self.nodes
        if spread > self.nodes or (self.colocate and spread < self.nodes):
            raise ValueError(
                f"placement.actor_nodes={spread} of placement.nodes={self.nodes}: roles that share GPUs are on all "
                "nodes, others on the rest; lower it, with placement.colocate=false, or leave it out"
            )
        if gpus and (self.devices_per_node or 0) > gpus:
            raise ValueError(
                f"placement.devices_per_node={self.devices_per_node}, but a machine has {gpus} GPUs; lower it"
            )
        ranks, other = self._shares(self.devices_per_node or gpus, groups)
        other = ranks if gpus and self.colocate else other
        engines, references = self.rollout_engines or max(1, other // tensor_parallel), self.references or other
        if ranks % spread:
            name = "actor_nodes" if self.actor_nodes else "nodes"
            raise ValueError(f"placement.actor_ranks={ranks} cannot be spread over placement.{name}={spread} evenly")
        devices = {ranks, engines * tensor_parallel, references if groups > 2 else ranks}
        if gpus and self.colocate and (len(devices) > 1 or ranks // spread % tensor_parallel):
            raise ValueError(
                f"placement.actor_ranks={ranks} on {spread} nodes, rollout_engines={engines} x rollout.tensor_parallel="
                f"{tensor_parallel} and references={references} cannot pair up on shared GPUs; set them to the same "
                "number of devices, an engine's all on one node, or placement.colocate=false"
            )
        return replace(self, actor_nodes=spread, actor_ranks=ranks, rollout_engines=engines, references=references)

    def _shares(self, each: int, groups: int) -> tuple[int, int]:
        """Ranks of the policy, and devices of each other role, with so many devices on each machine."""
        if self.colocate:
            every = self.nodes * max(1, each)
            return self.actor_ranks or every, every
        if self.actor_nodes in (None, self.nodes):
            every = self.nodes * max(1, each // groups)
            return self.actor_ranks or every, every
        ranks = self.actor_ranks or self.actor_nodes * max(1, each)
        return ranks, max(1, (self.nodes * each - ranks) // (groups - 1))
