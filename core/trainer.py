"""BaseTrainer: the workload that calls the other roles through one attribute RG_<ROLE> per role."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from core.members import RoleEntry
from core.role_group import RoleGroup
from core.roles import Role
from core.workload import BaseWorkload


class BaseTrainer(BaseWorkload):
    """Base class of the workload that drives a job: `init()`, then `fit()`. The job ends when `fit()` returns.

    `self.RG_ACTOR.update(batch)` calls `update` of every actor with the options of its `@trainer_invocation`. If a
    trainer declares `RG_ACTOR: RoleGroup[Actor]`, type checkers check its calls.

    Args:
        actor_handles: handles of the workers of each role.
        actor_classes: dotted name of the class of each role.
        config: configuration of the job.
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
        for role in self._callable_roles():
            setattr(self, role.group_name, RoleGroup(role, context=self._context))

    @abstractmethod
    def init(self) -> None:
        """Prepare data, tokenizer and models."""

    @abstractmethod
    def fit(self) -> None:
        """Run the training loop."""

    def run(self) -> None:
        """Run `init()`, then `fit()`. Called by the job."""
        self.init()
        self.fit()

    def _handles(self, role: Role) -> list[Any]:
        return self.actor_handles.get(role, [])

    def _callable_roles(self) -> dict[Role, RoleEntry]:
        return {role: entry for role, entry in self._context.directory.items() if role != self.role}

    if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts any name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("RG_"):
                groups = ", ".join(self.get_role_groups()) or "no role groups"
                raise AttributeError(f"this job has no {name}; it has {groups}")
            return super().__getattr__(name)

    def get_role_groups(self) -> list[str]:
        """Return the names of the job's role groups: `["RG_ACTOR", ...]`."""
        return sorted(role.group_name for role in self._callable_roles())

    def get_workload_resource(self, role: str) -> dict[str, float]:
        """Return the resources of each worker of a role: cpu (cores), accelerator (devices), memory (MB).

        Raises:
            ValueError: the job does not have the role.
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
