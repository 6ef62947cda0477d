"""Roles, and where they run: pools of processes, and which pool each role is in."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from .keys import refuse


class Role(StrEnum):
    """verl's roles. Wherever one of them is asked for, any other word will do, for a role of your own."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"
    ActorRolloutRef = "actor_rollout_ref"


POLICY_ROLES = (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor, Role.Rollout, Role.RefPolicy)
"""Roles that hold the policy; the words of their names say what each does."""


class ResourcePoolManager:
    """Which processes a role has.

    One pool for all roles is collocation; several pools are separation.

    Args:
        resource_pool_spec: pool -> processes on each of its nodes, one device each where there are devices.
        mapping: role -> pool.

    Raises:
        ConfigError: they do not fit together, or what trains and samples is not there exactly once.
    """

    def __init__(self, resource_pool_spec: Mapping[str, Sequence[int]], mapping: Mapping[str, str]) -> None:
        self.resource_pool_spec = dict(resource_pool_spec)
        self.mapping = {str(role): pool for role, pool in mapping.items()}
        for pool, counts in self.resource_pool_spec.items():
            uneven = not counts or min(counts) < 1 or len(set(counts)) > 1
            refuse({"pool_counts": uneven}, pool=pool, counts=list(counts))
        for role, pool in self.mapping.items():
            known = ", ".join(self.resource_pool_spec)
            refuse({"pool": pool not in self.resource_pool_spec}, role=role, pool=pool, known=known)
        for part in ("actor", "rollout"):
            self.holder(part)

    def holder(self, part: str) -> str:
        """The one policy role with `part` ("actor", "rollout" or "ref") in its name."""
        found = [role for role in self.mapping if role in POLICY_ROLES and part in role.split("_")]
        refuse({"holder": len(found) != 1}, found=", ".join(found) or "no role", part=part)
        return found[0]

    def nodes(self, role: str) -> int:
        """Machines over which the role's processes are spread."""
        return len(self.resource_pool_spec[self.mapping[role]])

    def workers(self, role: str) -> int:
        """Processes of the role, over all nodes."""
        return sum(self.resource_pool_spec[self.mapping[role]])

    def roles_of(self, pool: str) -> list[str]:
        """The roles that share the pool's devices."""
        return [role for role, own in self.mapping.items() if own == pool]

    def get_n_gpus(self) -> int:
        """Processes of all pools together."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())
