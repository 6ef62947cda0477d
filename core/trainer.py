"""BaseTrainer: the role that drives the others, with one RG_<ROLE> for each role of the job."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from core.members import RoleEntry
from core.role_group import RoleGroup
from core.roles import Role
from core.workload import BaseWorkload


class BaseTrainer(BaseWorkload):
    """Drives a job: `init()` prepares, `fit()` trains, and the job ends when `fit()` returns.

    `self.RG_ACTOR.update(batch)` calls `update` of every actor as its `@trainer_invocation` says. A trainer that
    declares `RG_ACTOR: RoleGroup[Actor]` has its calls checked by type checkers.

    Args:
        actor_handles: the workers of each role.
        actor_classes: the class of each role, as dotted names.
        config: what the job was built with.
    """

    RG_ACTOR: Any
    RG_CRITIC: Any
    RG_ROLLOUT: Any
    RG_REWARD: Any
    RG_REFERENCE: Any

    def __init__(
        self,
        actor_handles: dict[Role, list[Any]] | None = None,
        actor_classes: dict[Role, str] | None = None,
        config: Any = None,
    ) -> None:
        super().__init__(None, config)
        self.actor_handles = actor_handles or {}
        self.actor_classes = actor_classes or {}
        for role in self._others():
            setattr(self, role.group_name, RoleGroup(role, context=self._context))

    @abstractmethod
    def init(self) -> None:
        """Prepare: data, tokenizer, models."""

    @abstractmethod
    def fit(self) -> None:
        """Train."""

    def run(self) -> None:
        """What the job runs: `init()`, then `fit()`."""
        self.init()
        self.fit()

    def _handles(self, role: Role) -> list[Any]:
        return self.actor_handles.get(role, [])

    def _others(self) -> dict[Role, RoleEntry]:
        return {role: entry for role, entry in self._context.directory.items() if role != self.role}

    if not TYPE_CHECKING:  # it would make every name right

        def __getattr__(self, name: str) -> Any:
            if name.startswith("RG_"):
                raise AttributeError(
                    f"this job has no {name}; it has {', '.join(self.get_role_groups()) or 'no role groups'}"
                )
            return super().__getattr__(name)

    def get_role_groups(self) -> list[str]:
        """The names of the role groups that this job has: `["RG_ACTOR", ...]`."""
        return sorted(role.group_name for role in self._others())

    def get_workload_resource(self, role: str) -> dict[str, float]:
        """What each worker of a role was given: cpu (cores), accelerator (devices or a share of one), memory (MB).

        Raises:
            ValueError: the job has no such role.
        """
        entry = self._context.directory.get(Role(role))
        if entry is None:
            raise ValueError(f"the job has no role {role!r}; it has {sorted(self._context.directory)}")
        return dict(entry.resource)

    actors = property(lambda self: self._handles(Role.ACTOR), doc="Handles of the ACTOR workers.")
    critics = property(lambda self: self._handles(Role.CRITIC), doc="Handles of the CRITIC workers.")
    rollouts = property(lambda self: self._handles(Role.ROLLOUT), doc="Handles of the ROLLOUT workers.")
    rewards = property(lambda self: self._handles(Role.REWARD), doc="Handles of the REWARD workers.")
    references = property(lambda self: self._handles(Role.REFERENCE), doc="Handles of the REFERENCE workers.")
