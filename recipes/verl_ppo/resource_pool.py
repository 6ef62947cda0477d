"""Roles, and where they run: pools of processes, and which pool each role is in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from training.options.placement_options import PlacementOptions

POLICY_ROLES = ("actor_rollout_ref", "actor_rollout", "actor", "rollout", "ref")
"""Roles that hold the policy; the words of their names say what each does."""


@dataclass(kw_only=True)
class PoolOptions(PlacementOptions):
    """What runs where. One pool for all roles is colocation; several are separation."""

    pools: dict[str, list[int]] = field(default_factory=dict)
    """Pools: processes on each of their nodes, one device each where there are devices. Default: one pool, or with
    colocate=false one that trains and one that samples."""
    role_pools: dict[str, str] = field(default_factory=dict)
    """Role -> pool, of actor_rollout_ref, actor_rollout, actor, rollout, ref, critic, rm, and roles of your own.
    Default: actor_rollout (or actor and rollout), and what else is needed, in the first pool. With
    rollout.tensor_parallel above 1 each part of the policy is a role of its own, in the pool where it is."""
    share_processes: bool = False
    """The roles of a pool share processes, rank by rank, not only devices."""

    def __post_init__(self) -> None:
        super().__post_init__()
        actors, samplers = self._holders("actor"), self._holders("rollout")
        if actors and samplers:
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
            if len(found := self._holders(part)) != 1:
                yield (
                    f"placement.role_pools has {', '.join(found) or 'no role'} for the part {part} of the policy; name "
                    "actor_rollout_ref, or actor_rollout and ref, or actor, rollout and ref"
                )

    # --- who is where

    @property
    def spec(self) -> dict[str, list[int]]:
        """Pool -> processes on each of its nodes."""
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
        """Role -> pool, of every role that there may be."""
        pools = list(self.spec)
        found = {"actor_rollout": pools[0]} if self.colocate else {"actor": pools[0], "rollout": pools[-1]}
        if any(role in POLICY_ROLES[:-1] for role in self.role_pools):
            found = {}
        found |= self.role_pools
        others = ["critic", "rm"] if "actor_rollout_ref" in found else ["critic", "ref", "rm"]
        return found | {role: pools[0] for role in others if role not in found}

    def _holders(self, part: str) -> list[str]:
        return [role for role in self.mapping if role in POLICY_ROLES and part in role.split("_")]

    def holder(self, part: str) -> str:
        """The policy role with `part` ("actor", "rollout" or "ref") in its name."""
        return self._holders(part)[0]

    @property
    def is_hybrid(self) -> bool:
        """Whether what trains the policy samples from it too."""
        return self.holder("actor") == self.holder("rollout")

    @property
    def shares_devices(self) -> bool:
        """Whether the engines share their devices with other roles."""
        return self.is_hybrid or len(self.roles_of(self.mapping["rollout"])) > 1

    def nodes_of(self, role: str) -> int:
        """Machines over which the role's processes are spread."""
        return len(self.spec[self.mapping[role]])

    def workers(self, role: str) -> int:
        """Processes of the role, over all nodes."""
        return sum(self.spec.get(self.mapping[role], []))

    def roles_of(self, pool: str) -> list[str]:
        """The roles that share the pool's devices."""
        return [role for role, own in self.mapping.items() if own == pool]

    def resolved(self, gpus: int, groups: int, tensor_parallel: int = 1) -> PoolOptions:  # noqa: ARG002
        """See `PlacementOptions.resolved`. Engines of several devices are a role of their own, on those of as many
        ranks where they share them.

        Raises:
            ValueError: the engines do not fill their pool.
        """
        own = replace(self, devices_per_node=self.devices_per_node or max(gpus, 1))
        if not own.pools and not own.colocate and own.rollout_engines:
            devices = own.rollout_engines * tensor_parallel
            own.pools = own.spec | {"sample": [devices // own.nodes] * own.nodes}
        if tensor_parallel > 1:
            own.role_pools = own.one_part_each
            each = own.spec[own.mapping["rollout"]][0]
            if each % tensor_parallel:
                raise ValueError(
                    f"rollout.tensor_parallel={tensor_parallel}: the devices of an engine are on one node, and its "
                    f"pool has {each} on each; set a divisor of that, or give rollout a pool of its own in "
                    "placement.pools and placement.role_pools"
                )
        return replace(
            own,
            pools=own.spec,
            role_pools=own.mapping,
            nodes=max(own.nodes, *map(len, own.spec.values())),
            actor_ranks=own.workers(own.holder("actor")),
            rollout_engines=own.workers(own.holder("rollout")) // tensor_parallel,
            references=own.workers(own.holder("ref")) if self._holders("ref") else None,
        )

    @property
    def one_part_each(self) -> dict[str, str]:
        """`mapping` with a role for each part of the policy, in the pool where that part is."""
        found = dict[str, str]()
        for role, pool in self.mapping.items():
            parts = role.split("_") if role in POLICY_ROLES else [role]
            found |= dict.fromkeys(parts, pool)
        return found
