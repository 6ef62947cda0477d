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

    @property
    def takes_turns(self) -> bool:
        """True if engines or learners sleep while the others work."""
        return bool(self.engines_sleep) or self.learners_sleep

    def resolved(self, gpus: int, groups: int, tensor_parallel: int = 1) -> PlacementOptions:
        """Return the options with every number filled in that was left to the machine.

        Args:
            gpus: number of GPUs of each node.
            groups: number of roles that hold the policy: 2, or with a reference 3.
            tensor_parallel: devices of an engine.

        Raises:
            ValueError: the roles do not fit on the devices; the message says what to set.
        """
        actor_nodes = self.actor_nodes or self.nodes
        self._check_nodes(actor_nodes, gpus)
        actor_ranks, other_devices = self._shares(self.devices_per_node or gpus, groups)
        if gpus and self.colocate:
            other_devices = actor_ranks  # roles that share GPUs are as many as the ranks
        if actor_ranks % actor_nodes:
            name = "actor_nodes" if self.actor_nodes else "nodes"
            raise ValueError(
                f"placement.actor_ranks={actor_ranks} cannot be spread over placement.{name}={actor_nodes} evenly"
            )
        filled_in = replace(
            self,
            actor_nodes=actor_nodes,
            actor_ranks=actor_ranks,
            rollout_engines=self.rollout_engines or max(1, other_devices // tensor_parallel),
            references=self.references or other_devices,
        )
        if gpus and self.colocate:
            filled_in._check_pairs(actor_ranks, actor_nodes, groups, tensor_parallel)
        return filled_in

    def _check_nodes(self, actor_nodes: int, gpus: int) -> None:
        """Raise ValueError where there are fewer nodes, or GPUs of a node, than the options name."""
        if actor_nodes > self.nodes or (self.colocate and actor_nodes < self.nodes):
            raise ValueError(
                f"placement.actor_nodes={actor_nodes} of placement.nodes={self.nodes}: roles that share GPUs are on "
                "all nodes, others on the rest; lower it, with placement.colocate=false, or leave it out"
            )
        if gpus and (self.devices_per_node or 0) > gpus:
            raise ValueError(
                f"placement.devices_per_node={self.devices_per_node}, but a machine has {gpus} GPUs; lower it"
            )

    def _check_pairs(self, actor_ranks: int, actor_nodes: int, groups: int, tensor_parallel: int) -> None:
        """Raise ValueError where roles that share GPUs have different numbers of them."""
        has_reference = groups > 2
        engine_devices = (self.rollout_engines or 1) * tensor_parallel
        is_paired = engine_devices == actor_ranks and (not has_reference or self.references == actor_ranks)
        is_on_one_node = actor_ranks // actor_nodes % tensor_parallel == 0
        if not (is_paired and is_on_one_node):
            raise ValueError(
                f"placement.actor_ranks={actor_ranks} on {actor_nodes} nodes, rollout_engines={self.rollout_engines} x "
                f"rollout.tensor_parallel={tensor_parallel} and references={self.references} cannot pair up on shared "
                "GPUs; set them to the same number of devices, an engine's all on one node, or "
                "placement.colocate=false"
            )

    def _shares(self, node_devices: int, groups: int) -> tuple[int, int]:
        """Ranks of the policy, and devices of each other role.

        Args:
            node_devices: devices of each node that the run uses; 0 without GPUs.
            groups: number of roles that hold the policy.
        """
        if self.colocate:
            devices = self.nodes * max(1, node_devices)
            return self.actor_ranks or devices, devices
        if self.actor_nodes in (None, self.nodes):
            devices = self.nodes * max(1, node_devices // groups)
            return self.actor_ranks or devices, devices
        ranks = self.actor_ranks or self.actor_nodes * max(1, node_devices)
        return ranks, max(1, (self.nodes * node_devices - ranks) // (groups - 1))
