"""Options that assign roles to devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

from components.ranges import Count, CountFromZero
from components.registry import require
from training.options.schema import Options, errors_of, of_plugin


@dataclass(kw_only=True)
class PlacementOptions(Options, group="placement"):
    """Workers and devices of each role. Without a GPU every worker is a process on the CPU."""

    nodes: Count = 1
    """Number of machines that the run uses."""
    devices_per_node: Count | None = None
    """Number of GPUs to use on each machine; on machines without GPUs, number of processes. Default: all GPUs."""
    colocate: bool = True
    """Share the same devices among all roles, which then run one after the other. false gives each role devices of its
    own, and roles run concurrently where the algorithm allows it."""
    interface: str = of_plugin("environment", "")
    """Network interface of every machine for collectives, rendezvous and weights, such as eth1. Default: the interface
    with the address by which Ray reaches the machine."""
    handshake_timeout: CountFromZero | None = of_plugin("handshake", None)
    """Time limit in seconds of each check of a channel between processes, before models are loaded. 0 skips the checks.
    Default: 20 with several machines or GPUs, else 0."""
    actor_nodes: Count | None = None
    """Number of machines for the ranks of the policy. The other roles use the remaining machines. Default: all
    machines, for all roles."""
    actor_ranks: Count | None = None
    """Number of processes that train the policy, on all machines together. Default: one per GPU available to the
    policy, or 1 without GPUs."""
    rollout_engines: Count | None = None
    """Number of rollout engines. Default: one per rollout.tensor_parallel GPUs that are available to them. With shared
    GPUs these are the GPUs of the actor."""
    references: Count | None = None
    """Number of instances of the reference model, if there is a KL penalty. Default: same as for the rollout
    engines."""
    frozen_models: Literal["whole", "sharded", "offloaded"] = "whole"
    """Memory layout of reference and reward models. `whole`: each process holds the complete model, and a lost process
    is replaced. `sharded`: the processes share the weights and gather one layer at a time; if one is lost, the job
    restarts. `offloaded`: sharded, with all weights in host memory except the current layer."""
    elastic: bool = of_plugin("elastic", False)
    """Allow the number of rollout engines to change during the run. Engines are added and removed by
    scripts/engines.py, and with nodes that join or leave the cluster. See docs/several_gpus.md."""
    engines_sleep: bool | None = None
    """Release the GPU memory of rollout engines while the policy trains. Default: true if vllm shares GPUs with
    training and they do not fit in memory together."""
    learners_sleep: bool = False
    """Move actor and critic to host memory while responses are generated."""

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.interface:
            yield from errors_of("", require, "job environment", "workers", f"placement.interface={self.interface}")
        if self.elastic:
            yield from errors_of("", require, "job environment", "elastic", "placement.elastic=true")
        if self.handshake_timeout is not None:
            yield from errors_of("", require, "handshake", "channels", "placement.handshake_timeout")

    @property
    def shares_devices(self) -> bool:
        """True if the engines share their devices with other roles."""
        return self.colocate

    def with_sleep(self, gpus: int, engine: str) -> Self:
        """Resolve `engines_sleep`: engines sleep by default if that frees GPU memory for training. The plan keeps them
        awake if it knows that everything fits (`training.launch.plan.Choose`).
        """
        if self.engines_sleep is not None:
            return self
        return replace(self, engines_sleep=gpus > 0 and engine == "vllm" and self.colocate)

    @property
    def takes_turns(self) -> bool:
        """True if engines or learners sleep while the others work."""
        return bool(self.engines_sleep) or self.learners_sleep

    def resolved(self, gpus: int, groups: int, tensor_parallel: int = 1) -> PlacementOptions:
        """Return the options with all automatic numbers resolved.

        Args:
            gpus: number of GPUs of each node.
            groups: number of roles that hold the policy: 2, or 3 with a reference model.
            tensor_parallel: number of devices per engine.

        Raises:
            ValueError: the roles do not fit on the devices. The message names the options to change.
        """
        actor_nodes = self.actor_nodes or self.nodes
        self._check_nodes(actor_nodes, gpus)
        most = self.devices_per_node or gpus
        if gpus and tensor_parallel > most:
            raise ValueError(
                f"rollout.tensor_parallel={tensor_parallel}, but a machine has {most} GPUs, and an engine cannot span "
                f"machines: all its processes start on the machine of its role. Set at most {most}; a model that does "
                "not fit then may fit with rollout.vllm.quantization=fp8"
            )
        actor_ranks, other_devices = self._shares(self.devices_per_node or gpus, groups)
        if gpus and self.colocate:
            other_devices = actor_ranks  # each rank shares its GPU with one instance of the other roles
        # Every node runs the same number of ranks: the launcher of a process group has no other layout.
        if actor_ranks % actor_nodes:
            raise ValueError(
                f"placement.actor_ranks={actor_ranks} is not a multiple of the {actor_nodes} nodes of the actor; set a "
                "multiple, or change placement.nodes or placement.actor_nodes"
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
        """Raise ValueError if there are fewer nodes, or GPUs per node, than the options request."""
        if actor_nodes > self.nodes or (self.colocate and actor_nodes < self.nodes):
            raise ValueError(
                f"placement.actor_nodes={actor_nodes} with placement.nodes={self.nodes}: roles that share GPUs use all "
                "nodes, and separate roles need some of the nodes; leave it out, or lower it and set "
                "placement.colocate=false"
            )
        if gpus and (self.devices_per_node or 0) > gpus:
            raise ValueError(
                f"placement.devices_per_node={self.devices_per_node}, but a machine only has {gpus} GPUs; lower it"
            )

    def _check_pairs(self, actor_ranks: int, actor_nodes: int, groups: int, tensor_parallel: int) -> None:
        """Raise ValueError if roles that share GPUs request different numbers of them."""
        has_reference = groups > 2
        engines = self.rollout_engines or 1
        is_paired = engines * tensor_parallel == actor_ranks and (not has_reference or self.references == actor_ranks)
        is_on_one_node = actor_ranks // actor_nodes % tensor_parallel == 0
        if not (is_paired and is_on_one_node):
            raise ValueError(
                f"placement.actor_ranks={actor_ranks} on {actor_nodes} nodes, rollout_engines={self.rollout_engines} x "
                f"rollout.tensor_parallel={tensor_parallel} and references={self.references} cannot share "
                "GPUs; set the same number of devices for each, with all devices of an engine on one node, or set "
                "placement.colocate=false"
            )

    def _shares(self, node_devices: int, groups: int) -> tuple[int, int]:
        """Return the number of ranks of the policy, and the number of devices of each other role.

        Args:
            node_devices: number of devices of each node that the run uses, or 0 without GPUs.
            groups: number of roles that hold the policy.
        """
        # Without GPUs `max` gives each role one process per node.
        if self.colocate:
            devices = self.nodes * max(1, node_devices)
            return self.actor_ranks or devices, devices
        if self.actor_nodes in (None, self.nodes):
            devices = self.nodes * max(1, node_devices // groups)
            return self.actor_ranks or devices, devices
        ranks = self.actor_ranks or self.actor_nodes * max(1, node_devices)
        return ranks, max(1, (self.nodes * node_devices - ranks) // (groups - 1))
