"""Placement of roles: pools of processes, and the pool of each role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from training.options.placement_options import PlacementOptions

POLICY_ROLES = ("actor_rollout_ref", "actor_rollout", "actor", "rollout", "ref")
"""Roles that hold the policy. The parts of a name (actor, rollout, ref) are the tasks of the role."""


@dataclass(kw_only=True)
class PoolOptions(PlacementOptions):
    """Placement of the roles. With one pool all roles are colocated, with several pools they are separated."""

    pools: dict[str, list[int]] = field(default_factory=dict)
    """Pool -> number of processes on each of its nodes, with one device per process if there are devices. Default: one
    pool, or with colocate=false one for training and one for sampling."""
    role_pools: dict[str, str] = field(default_factory=dict)
    """Role -> pool. Roles are actor_rollout_ref, actor_rollout, actor, rollout, ref, critic, rm, and your own.
    Default: actor_rollout (or actor and rollout) and all other roles that are needed, in the first pool. With
    rollout.tensor_parallel above 1 each part of the policy becomes a separate role in the same pool."""
    share_processes: bool = False
    """The roles of a pool share processes, rank by rank, in addition to devices."""

    def __post_init__(self) -> None:
        super().__post_init__()
        actors = self._holders("actor")
        if actors and (samplers := self._holders("rollout")):
            self.colocate = self.mapping[actors[0]] == self.mapping[samplers[0]]

    def faults(self) -> Iterator[str]:
        """See `Options.faults`."""
        yield from super().faults()
        if self.actor_nodes is not None and not self.pools:
            yield f"placement.actor_nodes={self.actor_nodes}; set the nodes of each pool in placement.pools"
        for pool, counts in self.pools.items():
            if not counts or min(counts) < 1 or len(set(counts)) > 1:
                yield (
                    f"placement.pools has {pool}: {counts}; set the processes on each of its nodes, the same number of "
                    "at least 1 on all, as [4, 4]"
                )
        known = ", ".join(self.spec)
        for role, pool in self.role_pools.items():
            if pool not in self.spec:
                yield f"placement.role_pools puts {role} into the pool {pool}, but placement.pools has {known}; add it"
        for part in ("actor", "rollout"):
            if len(holders := self._holders(part)) != 1:
                yield (
                    f"placement.role_pools has {', '.join(holders) or 'no role'} for the part {part} of the policy; "
                    "name actor_rollout_ref, or actor_rollout and ref, or actor, rollout and ref"
                )

    # --- placement of the roles

    @property
    def spec(self) -> dict[str, list[int]]:
        """Pool -> number of processes on each of its nodes."""
        if self.pools:
            return self.pools
        per_node = self.devices_per_node or 1
        ranks = self.actor_ranks or per_node * self.nodes
        if self.colocate:
            return {"global_pool": [ranks // self.nodes] * self.nodes}
        half = max(per_node // 2, 1)
        ranks = self.actor_ranks or half * self.nodes
        return {"train": [ranks // self.nodes] * self.nodes, "sample": [half] * self.nodes}

    @property
    def mapping(self) -> dict[str, str]:
        """Role -> pool, including roles that may not be needed."""
        pools = list(self.spec)
        mapping = {"actor_rollout": pools[0]} if self.colocate else {"actor": pools[0], "rollout": pools[-1]}
        if any(role in POLICY_ROLES[:-1] for role in self.role_pools):
            mapping = {}
        mapping |= self.role_pools
        others = ["critic", "rm"] if "actor_rollout_ref" in mapping else ["critic", "ref", "rm"]
        return mapping | {role: pools[0] for role in others if role not in mapping}

    def _holders(self, part: str) -> list[str]:
        return [role for role in self.mapping if role in POLICY_ROLES and part in role.split("_")]

    def holder(self, part: str) -> str:
        """Return the policy role with `part` ("actor", "rollout" or "ref") in its name."""
        return self._holders(part)[0]

    @property
    def is_hybrid(self) -> bool:
        """True if the role that trains the policy also samples from it."""
        return self.holder("actor") == self.holder("rollout")

    @property
    def shares_devices(self) -> bool:
        """True if the engines share their devices with other roles."""
        return self.is_hybrid or len(self.roles_of(self.mapping["rollout"])) > 1

    def nodes_of(self, role: str) -> int:
        """Return the number of machines over which a role's processes are spread."""
        return len(self.spec[self.mapping[role]])

    def workers(self, role: str) -> int:
        """Return the number of processes of a role on all nodes."""
        return sum(self.spec.get(self.mapping[role], []))

    def roles_of(self, pool: str) -> list[str]:
        """Return the roles that share a pool's devices."""
        return [role for role, its_pool in self.mapping.items() if its_pool == pool]

    def resolved(self, gpus: int, groups: int, tensor_parallel: int = 1) -> PoolOptions:  # noqa: ARG002
        """See `PlacementOptions.resolved`. Engines with several devices are a separate role. If they share devices with
        ranks, an engine takes the devices of `tensor_parallel` ranks.

        Raises:
            ValueError: `tensor_parallel` does not divide the devices of a node of the engines' pool.
        """
        options = replace(self, devices_per_node=self.devices_per_node or max(gpus, 1))
        if not options.pools and not options.colocate and options.rollout_engines:
            devices = options.rollout_engines * tensor_parallel
            options.pools = options.spec | {"sample": [devices // options.nodes] * options.nodes}
        if tensor_parallel > 1:
            options.role_pools = options.separate_parts
            each = options.spec[options.mapping["rollout"]][0]
            if each % tensor_parallel:
                raise ValueError(
                    f"rollout.tensor_parallel={tensor_parallel}: the devices of an engine are on one node, and its "
                    f"pool has {each} on each; set a divisor of that, or give rollout a pool of its own in "
                    "placement.pools and placement.role_pools"
                )
        return replace(
            options,
            pools=options.spec,
            role_pools=options.mapping,
            nodes=max(options.nodes, *map(len, options.spec.values())),
            actor_ranks=options.workers(options.holder("actor")),
            rollout_engines=options.workers(options.holder("rollout")) // tensor_parallel,
            references=options.workers(options.holder("ref")) if self._holders("ref") else None,
        )

    @property
    def separate_parts(self) -> dict[str, str]:
        """`mapping` with a separate role for each part of the policy, in the same pool."""
        mapping = dict[str, str]()
        for role, pool in self.mapping.items():
            parts = role.split("_") if role in POLICY_ROLES else [role]
            mapping |= dict.fromkeys(parts, pool)
        return mapping
