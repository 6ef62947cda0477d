"""BaseWorkload: who am I, and my life cycle."""

import inspect
import os
from abc import ABCMeta
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from core.context import WorkloadContext, current
from core.exports import Export, export_of
from core.invocation import rpc
from core.migration import alias_of
from core.roles import Role

if TYPE_CHECKING:
    from core.role_group import WorkerGroup

    C = TypeVar("C", bound=type)

    class _SeenAsGroup(ABCMeta, WorkerGroup[Any]):
        """What a group has beside the workers' methods: where `RG_ACTOR: RoleGroup[Actor]` is read, it is the class."""

        def __get__(self: C, instance: Any, owner: Any) -> C: ...  # a class that is an attribute is that class
        def __getitem__(self, index: Any) -> Any: ...  # a member; of a generic class the class
else:
    _SeenAsGroup = ABCMeta


class BaseWorkload(metaclass=_SeenAsGroup):
    """One worker of a role. Subclass it, and decorate what others may call.

    The life of a workload: it is constructed in its own process, `setup()` runs, calls arrive one at a time on the
    main thread, `teardown()` runs when the job ends well. Do heavy work in `setup()` or in a method of your own,
    not in `__init__`.

    Attributes:
        config: what the job was built with.
        name: unique in the job: `ACTOR-0`.
        role: my role.
        rank: my number among the workers of my role, from 0.
        world_size: how many workers my role has.
        local_rank: my number among the workers of my role on this node, from 0.
        local_world_size: how many workers of my role share this node.
        job_name: the name that the job was submitted under.
        run_id: unique to this run of the job.
        attempt: 1, and one more each time that I was started again, alone or with the whole job.
        began: when the user started this run, in seconds since the epoch.
        shared_dir: a folder in this machine's shared memory, removed when the run ends.
        torch_master_addr: address for torch's rendezvous; empty for roles without one.
        torch_master_port: port for torch's rendezvous; -1 for roles without one.
    """

    def __init__(self, master_handle: Any = None, config: Any = None) -> None:  # noqa: ARG002 - DLRover's signature
        self._context: WorkloadContext = current()
        self._meshes: dict[str, tuple[int, bool]] = {}
        self.config = config if config is not None else self._context.config
        self.shared_dir = self._context.shared_dir
        self.torch_master_addr, self.torch_master_port = self._context.rendezvous or ("", -1)
        identity = self._context.identity
        self.name = identity.name
        self.role = identity.role
        self.rank = identity.rank
        self.world_size = identity.world_size
        self.local_rank = identity.local_rank
        self.local_world_size = identity.local_world_size
        self.job_name = identity.job
        self.run_id = identity.run_id
        self.attempt = identity.attempt
        self.began = identity.began

    if not TYPE_CHECKING:  # to a type checker every name would exist

        def __getattr__(self, name: str) -> Any:
            owner = type(self).__name__
            if alias := alias_of("workload", name, owner, AttributeError):
                return getattr(self, alias)
            # Raises what Python raises, also for a property whose own code has failed.
            return object.__getattribute__(self, name)

    def setup(self) -> None:
        """Called once, before any other call. The other roles may not be there yet."""

    def teardown(self) -> None:
        """Called once when the job has ended well. A run that failed or was killed never gets here."""

    def is_fatal(self, error: Exception) -> bool:  # noqa: ARG002 - for subclasses
        """Whether my process is of no use after what a method of mine raised: then it ends, and counts as dead."""
        return False

    @property
    def stop_requested(self) -> bool:
        """Whether the user has asked the run to stop: save what is to be kept, and return from `run()`.

        It comes true in the workload that drives the job, if the job has a `stop_grace`.
        """
        return self._context.stop_requested.is_set()

    def is_actor_role(self) -> bool:
        """Whether my role is ACTOR."""
        return self.role == Role.ACTOR

    def is_rollout_role(self) -> bool:
        """Whether my role is ROLLOUT."""
        return self.role == Role.ROLLOUT

    def is_reward_role(self) -> bool:
        """Whether my role is REWARD."""
        return self.role == Role.REWARD

    def is_reference_role(self) -> bool:
        """Whether my role is REFERENCE."""
        return self.role == Role.REFERENCE

    def is_critic_role(self) -> bool:
        """Whether my role is CRITIC."""
        return self.role == Role.CRITIC

    def get_device_collocation(self) -> str | None:
        """The roles that share my device, `ACTOR,ROLLOUT`, or None."""
        return ",".join(self._context.collocated_with) or None

    def info(self, text: str) -> None:
        """Show a line to the person at the terminal where the job was started."""
        self._context.info(text)

    def emit(self, event: Any) -> None:
        """Pass an event, an instance of a dataclass that the driver can import, to the job's observers."""
        self._context.emit("event", event)

    @property
    def job_memory_bytes(self) -> int:
        """Proportional set sizes of all processes of the job together, as the driver counted them last, about every two
        seconds; 0 before the first time.
        """
        return self._context.job_memory()

    def register_mesh(self, mesh: str, dp_rank: int, is_collect: bool = True) -> None:
        """Register for worker groups which data-parallel rank I am of a mesh, and whether my result is taken for it.

        Raises:
            ValueError: registered before.
        """
        if mesh in self._meshes:
            raise ValueError(f"{self.name} has registered its place in the mesh {mesh!r} already: {self._meshes[mesh]}")
        self._meshes[mesh] = (dp_rank, is_collect)

    @rpc()
    def mesh_position(self, mesh: str) -> tuple[int, bool]:
        """(data-parallel rank, whether my result is taken for it).

        Raises:
            ValueError: I have no place in this mesh.
        """
        if mesh not in self._meshes:
            raise ValueError(
                f"{self.name} has no place in the mesh {mesh!r}; call self.register_mesh({mesh!r}, dp_rank, is_collect)"
            )
        return self._meshes[mesh]

    def setup_process_group(self, make: Callable[[], None]) -> None:
        """Let an engine make the process group of my role's ranks, before any other library can make one.

        Exports RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and calls `make()`, which
        is to call `torch.distributed.init_process_group`.
        """
        os.environ.update(rendezvous_environment(self._context))
        make()


def export_rpc_method(name: str, function: Callable[..., Any]) -> None:
    """Let `RoleGroup.call(name, ...)` call a function in this workload. Call it in `__init__` or `setup()`."""
    current().exported.append((Export(name), function))


def export_verl_worker_rpc(worker: object) -> None:
    """Let others call the methods of an object that the workload holds: those that `@register` or `@rpc` decorates.

    Call it in `__init__` or `setup()`.
    """
    found = [(export_of(inspect.getattr_static(type(worker), name)), name) for name in dir(type(worker))]
    current().exported += [(export, getattr(worker, name)) for export, name in found if export]


def rendezvous_environment(context: WorkloadContext) -> dict[str, str]:
    """The variables by which torch.distributed finds the other ranks."""
    identity = context.identity
    environment = {
        "RANK": str(identity.rank),
        "WORLD_SIZE": str(identity.world_size),
        "LOCAL_RANK": str(identity.local_rank),
        "LOCAL_WORLD_SIZE": str(identity.local_world_size),
    }
    if context.rendezvous is not None:
        environment |= {"MASTER_ADDR": context.rendezvous[0], "MASTER_PORT": str(context.rendezvous[1])}
    return environment
