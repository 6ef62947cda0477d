"""Data classes of a job: roles, resources, placement, limits, and the result of a run."""

import dataclasses
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, field_serializer

from core.members import Kind


class Resource(BaseModel):
    """Resources of each worker of a role."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu: float = Field(default=1.0, gt=0)
    """Number of cores."""
    threads: int = 0
    """Number of threads of the maths libraries in each process. 0: the number of whole cores in `cpu`, at least 1.
    -1: the number of cores of the node. -n: that number divided by n. Roles that run one after the other on the same
    cores may each use all of them."""
    accelerator: float = Field(default=0.0, ge=0)
    """Number of devices, or a share of one. Ignored unless the job's device type is GPU."""
    memory: int = Field(default=0, ge=0)
    """Memory to reserve in MB. 0 reserves no memory."""
    custom: dict[str, float] = {}
    """Custom resources, by the names with which the nodes of the cluster were started, or `node:<ip>`."""


class RoleSpec(BaseModel):
    """One role: its class, number of workers, and their resources."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    name: str
    entrypoint: str
    """Path of the class, `package.module:Class`."""
    kind: Kind
    """"train": ranks that rendezvous. "run": independent instances."""
    nnodes: int = Field(default=1, ge=1)
    nproc_per_node: int = Field(default=1, ge=1)
    resource: Resource = Resource()
    env: dict[str, str] = {}
    process: str | None = None
    """Process name. Roles with the same process name share processes, rank by rank."""
    max_restarts: int = Field(default=3, ge=0)
    """Maximum number of replacements of lost instances before the job restarts ("run" roles only). Instances lost
    together, for example with their node, count once."""
    concurrency: int = Field(default=1, ge=1)
    """Maximum number of concurrent calls to async methods of one worker."""
    comm_pre_check: Literal[False] = False
    """Option of DLRover. Always False: nodes are not checked before the start."""
    comm_auto_setup_process_group: Literal[False] = False
    """Option of DLRover. Always False: core sets the environment for a process group, and the engine creates it."""

    @property
    def backend(self) -> Literal["elastic", "simple"]:
        """DLRover's name for the kind."""
        return "elastic" if self.kind == "train" else "simple"

    @property
    def total(self) -> int:
        """Number of workers."""
        return self.nnodes * self.nproc_per_node


class ProcessPlan(Resource):
    """One process: its workers, and its share of a bundle."""

    workers: list[tuple[str, int]]
    bundle: int
    shown: list[int] = []
    """Indices of the bundle's devices that the process uses, if another process has reserved all of them."""
    env: dict[str, str] = {}

    @property
    def name(self) -> str:
        """Display name, such as `ACTOR-0` or `ACTOR-0+ROLLOUT-0`."""
        return "+".join(f"{role}-{rank}" for role, rank in self.workers)

    @property
    def roles(self) -> list[str]:
        """Roles of the workers, without duplicates."""
        return [role for role, _ in self.workers]


class BundlePlan(Resource):
    """Resources that are reserved together on one node."""

    machine: tuple[str, int] | None = None
    """(role, index of its machine) if a role of the bundle spans several machines. None: any machine with room."""


class Placement(BaseModel):
    """Complete placement: bundles, the processes inside them, and totals per role."""

    processes: dict[str, int]
    """Number of workers of each role."""
    devices: dict[str, float]
    """Number of accelerators of each role, with fractions for shares. All 0 if the job runs on CPU."""

    bundles: list[BundlePlan]
    hosts: list[ProcessPlan]


class Limits(BaseModel):
    """Limits for restarts, hung processes, placement and stop requests."""

    max_restarts: int = Field(default=3, ge=0)
    """Maximum number of restarts of the whole job after a rank or the trainer dies."""
    stall_timeout: float = Field(default=0.0, ge=0)
    """Seconds without progress after which a process counts as hung and is killed. 0 disables it."""
    placement_timeout: float = Field(default=30.0, gt=0)
    """Seconds that the job, and the replacement of a process, wait for free resources in the cluster."""
    stop_grace: float = Field(default=0.0, ge=0)
    """Seconds that the driving workload has after Ctrl-C to see `stop_requested` and return. 0 stops it at once."""


class JobSpec(Limits):
    """Checked job description, the input of the master."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    device_type: Literal["CPU", "GPU"]
    node_num: int = Field(ge=1)
    device_per_node: int = Field(ge=0)
    roles: dict[str, RoleSpec]
    placement: Placement
    collocations: list[list[str]] = []
    global_env: dict[str, str] = {}
    config: Any = None

    @field_serializer("config")
    def _plain_config(self, config: Any) -> Any:
        # A plan is printed as JSON, and pydantic knows neither OmegaConf nor a dataclass behind `Any`.
        if dataclasses.is_dataclass(config) and not isinstance(config, type):
            return dataclasses.asdict(config)
        return OmegaConf.to_container(config) if OmegaConf.is_config(config) else config


class JobResult(BaseModel):
    """Result of a run."""

    run_id: str
    status: Literal["finished", "failed", "stopped"]
    error: str = ""
    traceback: str = ""
    output: str = ""
    """Last lines of output of the process that died."""
    attempt: int = 1
    """Number of starts of the job, including restarts."""
    elapsed: float = 0.0
    """Seconds from submission to the end."""
    peak_memory_bytes: int = 0
    """Peak of the summed proportional set sizes of the job's processes."""

    @property
    def exit_code(self) -> int:
        """Exit code: 0 finished, 1 failed, 130 stopped by the user."""
        return {"finished": 0, "failed": 1, "stopped": 130}[self.status]
