"""The plan of a job as data: roles, what each worker is given, and which process holds which worker."""

from pydantic import BaseModel, ConfigDict, Field

from core.context import Kind


class Resource(BaseModel):
    """What each worker of a role is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu: float = Field(default=1.0, gt=0)
    """Cores. They decide the number of threads: at least one, else the whole part."""
    accelerator: float = Field(default=0.0, ge=0)
    """Devices, or a share of one. Counts only where the job's device type is GPU."""
    memory: int = Field(default=0, ge=0)
    """MB to reserve; 0 reserves nothing."""


class RoleSpec(BaseModel):
    """One role: which class, how many workers, what each is given."""

    model_config = ConfigDict(extra="forbid")

    name: str
    entrypoint: str
    """`package.module:Class`"""
    kind: Kind
    """"train": ranks that rendezvous. "run": independent instances."""
    nnodes: int = Field(default=1, ge=1)
    nproc_per_node: int = Field(default=1, ge=1)
    resource: Resource = Resource()
    env: dict[str, str] = {}
    process: str | None = None
    """Roles with the same name here share processes, rank by rank."""

    @property
    def total(self) -> int:
        """How many workers."""
        return self.nnodes * self.nproc_per_node


class HostPlan(BaseModel):
    """One process: the workers it holds, and its share of a bundle."""

    workers: list[tuple[str, int]]
    bundle: int
    cpu: float
    accelerator: float
    memory: int
    env: dict[str, str] = {}

    @property
    def name(self) -> str:
        """For people: `ACTOR-0`, or `ACTOR-0+ROLLOUT-0`."""
        return "+".join(f"{role}-{rank}" for role, rank in self.workers)


class BundlePlan(BaseModel):
    """Resources that are reserved together on one node."""

    cpu: float
    accelerator: float
    memory: int


class Placement(BaseModel):
    """The whole plan: bundles, the processes inside them, and how many of what each role has in all."""

    processes: dict[str, int]
    devices: dict[str, float]
    """Accelerators, or shares of them; all 0 where the job runs on CPU."""

    bundles: list[BundlePlan]
    hosts: list[HostPlan]
