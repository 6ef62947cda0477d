"""BaseWorkload: base class of the workers of a role, with their identity and life cycle."""

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
        """Attributes of a group besides the workers' methods.

        A type checker reads an attribute `RG_ACTOR: RoleGroup[Actor]` as the class Actor, so the class gets them.
        """

        def __get__(self: C, instance: Any, owner: Any) -> C: ...  # reading the attribute gives the class itself
        def __getitem__(self, index: Any) -> Any: ...  # a member, or a parametrised generic class
else:
    _SeenAsGroup = ABCMeta


class BaseWorkload(metaclass=_SeenAsGroup):
    """Base class of the workers of a role. Subclass it, and decorate the methods that other roles may call.

    Life cycle: the workload is constructed in its own process, `setup()` runs, calls run one at a time on the main
    thread, and `teardown()` runs when the job ends without a failure. Do heavy work in `setup()` or in your own
    methods, not in `__init__`.

    Attributes:
        config: configuration of the job.
        name: name of the worker, unique in the job, such as `ACTOR-0`.
        role: role of the worker.
        rank: rank among the workers of the role, from 0.
        world_size: number of workers of the role.
        local_rank: rank among the workers of the role on this node, from 0.
        local_world_size: number of workers of the role on this node.
        job_name: name under which the job was submitted.
        run_id: unique id of this run of the job.
        attempt: number of starts of this worker: 1, plus one for every restart, alone or with the whole job.
        began: time at which the user started this run, in seconds since the epoch.
        shared_dir: folder in the shared memory of this machine, removed when the run ends.
        torch_master_addr: address for torch's rendezvous. Empty for roles without one.
        torch_master_port: port for torch's rendezvous. -1 for roles without one.
    """

    def __init__(self, master_handle: Any = None, config: Any = None) -> None:  # noqa: ARG002 - DLRover's signature
        self._context: WorkloadContext = current()
        self._meshes: dict[str, tuple[int, bool]] = {}
        self.config = self._context.config if config is None else config
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

    if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts any name

        def __getattr__(self, name: str) -> Any:
            owner = type(self).__name__
            if alias := alias_of("workload", name, owner, AttributeError):
                return getattr(self, alias)
            # Raises Python's own error, also for a property whose code has raised an AttributeError.
            return object.__getattribute__(self, name)

    def setup(self) -> None:
        """Set up the workload. Called once before any other call. The other roles may not exist yet."""

    def teardown(self) -> None:
        """Release resources. Called once when the job ends without a failure, never after a failure or a kill."""

    def is_fatal(self, error: Exception) -> bool:  # noqa: ARG002 - for subclasses
        """True if the process is unusable after a method has raised `error`. It is then killed and counts as dead."""
        return False

    @property
    def stop_requested(self) -> bool:
        """True if the user has requested a stop: save the state, and return from `run()`.

        It is set only in the workload that drives the job, and only if the job has a `stop_grace`.
        """
        return self._context.stop_requested.is_set()

    def is_actor_role(self) -> bool:
        """True if the role is ACTOR."""
        return self.role == Role.ACTOR

    def is_rollout_role(self) -> bool:
        """True if the role is ROLLOUT."""
        return self.role == Role.ROLLOUT

    def is_reward_role(self) -> bool:
        """True if the role is REWARD."""
        return self.role == Role.REWARD

    def is_reference_role(self) -> bool:
        """True if the role is REFERENCE."""
        return self.role == Role.REFERENCE

    def is_critic_role(self) -> bool:
        """True if the role is CRITIC."""
        return self.role == Role.CRITIC

    def get_device_collocation(self) -> str | None:
        """Return the roles that share this worker's device, such as `ACTOR,ROLLOUT`, or None."""
        return ",".join(self._context.collocated_with) or None

    def info(self, text: str) -> None:
        """Print a line at the terminal where the job was started."""
        self._context.info(text)

    def emit(self, event: Any) -> None:
        """Send an event to the job's observers. It must be an instance of a dataclass that the driver can import."""
        self._context.emit("event", event)

    @property
    def job_memory_bytes(self) -> int:
        """Sum of the proportional set sizes of all processes of the job in bytes.

        The driver updates it about every two seconds. It is 0 before the first update.
        """
        return self._context.job_memory()

    def register_mesh(self, mesh: str, dp_rank: int, is_collect: bool = True) -> None:
        """Register this worker's position in a mesh, for calls of worker groups with `nd_compute(mesh)`.

        Args:
            mesh: name of the mesh.
            dp_rank: data-parallel rank of this worker.
            is_collect: True if this worker's result is the result of its data-parallel rank.

        Raises:
            ValueError: the position was registered before.
        """
        if mesh in self._meshes:
            raise ValueError(f"{self.name} is already registered in the mesh {mesh!r} as {self._meshes[mesh]}")
        self._meshes[mesh] = (dp_rank, is_collect)

    @rpc()
    def mesh_position(self, mesh: str) -> tuple[int, bool]:
        """Return (dp_rank, is_collect) of this worker in a mesh.

        Raises:
            ValueError: no position was registered for this mesh.
        """
        if mesh not in self._meshes:
            raise ValueError(f"{self.name} is not registered in the mesh {mesh!r}; call register_mesh in its setup()")
        return self._meshes[mesh]

    def setup_process_group(self, make: Callable[[], None]) -> None:
        """Create the process group of the role's ranks by a function of the engine.

        Exports RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and calls `make()`, which
        must call `torch.distributed.init_process_group`. Call this before any other library can create a process group.
        """
        os.environ.update(rendezvous_environment(self._context))
        make()


def export_rpc_method(name: str, function: Callable[..., Any]) -> None:
    """Export a function of this workload to `RoleGroup.call(name, ...)`. Call it in `__init__` or `setup()`."""
    current().exported.append((Export(name), function))


def export_verl_worker_rpc(worker: object) -> None:
    """Export the methods of an object that are decorated with `@register` or `@rpc`, in addition to the workload's own.

    Call it in `__init__` or `setup()`.
    """
    for name in dir(type(worker)):
        if export := export_of(inspect.getattr_static(type(worker), name)):
            current().exported.append((export, getattr(worker, name)))


def rendezvous_environment(context: WorkloadContext) -> dict[str, str]:
    """Return the environment variables for the rendezvous of torch.distributed."""
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
