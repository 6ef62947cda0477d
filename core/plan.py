"""A job as data: its roles, what each worker is given, which process holds which worker, and how a run ended."""

import dataclasses
from typing import Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, field_serializer

from core.members import Kind


class Resource(BaseModel):
    """What each worker of a role is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu: float = Field(default=1.0, gt=0)
    """Cores."""
    threads: int = 0
    """Of the maths libraries, in each process. 0: as many as whole cores, at least one; -1: as many as its node has
    cores, -2: half as many, and so on. Roles that work one after the other on the same cores may each have a thread for
    all of them."""
    accelerator: float = Field(default=0.0, ge=0)
    """Devices, or a share of one. Counts only where the job's device type is GPU."""
    memory: int = Field(default=0, ge=0)
    """MB to reserve; 0 reserves nothing."""
    custom: dict[str, float] = {}
    """What the cluster's nodes were started with beside these, by its own names, or `node:<ip>`."""


class RoleSpec(BaseModel):
    """One role: which class, how many workers, what each is given."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

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
    max_restarts: int = Field(default=3, ge=0)
    """How often instances may be lost and replaced before all starts again; losses at the same time, as with a node,
    count once. Of "run" roles only."""
    concurrency: int = Field(default=1, ge=1)
    """How many calls to async methods of one worker may run beside each other."""
    comm_pre_check: Literal[False] = False
    """DLRover's name: nodes are not checked before the start."""
    comm_auto_setup_process_group: Literal[False] = False
    """DLRover's name: core sets the environment for a process group, and the engine makes it."""

    @property
    def backend(self) -> Literal["elastic", "simple"]:
        """DLRover's name for the kind."""
        return "elastic" if self.kind == "train" else "simple"

    @property
    def total(self) -> int:
        """How many workers."""
        return self.nnodes * self.nproc_per_node


class ProcessPlan(Resource):
    """One process: the workers it holds, and its share of a bundle."""

    workers: list[tuple[str, int]]
    bundle: int
    shown: list[int] = []
    """Which of its bundle's devices it works on, where another process of the bundle claims them all."""
    env: dict[str, str] = {}

    @property
    def name(self) -> str:
        """For people: `ACTOR-0`, or `ACTOR-0+ROLLOUT-0`."""
        return "+".join(f"{role}-{rank}" for role, rank in self.workers)

    @property
    def roles(self) -> list[str]:
        """Of its workers, each once."""
        return [role for role, _ in self.workers]


class BundlePlan(Resource):
    """Resources that are reserved together on one node."""

    machine: tuple[str, int] | None = None
    """The role that is spread over machines, and on which of its machines this is; None: wherever there is room."""


class Placement(BaseModel):
    """The whole plan: bundles, the processes inside them, and how many of what each role has in all."""

    processes: dict[str, int]
    devices: dict[str, float]
    """Accelerators, or shares of them; all 0 where the job runs on CPU."""

    bundles: list[BundlePlan]
    hosts: list[ProcessPlan]


class Limits(BaseModel):
    """What happens when processes die, hang, or are to stop."""

    max_restarts: int = Field(default=3, ge=0)
    """How often all starts again after the death of a rank or of the trainer."""
    stall_timeout: float = Field(default=0.0, ge=0)
    """Seconds without a sign of progress after which a process is taken for hung, and ended; 0: never."""
    placement_timeout: float = Field(default=30.0, gt=0)
    """Seconds that the job, and a process that takes a lost one's place, wait for room in the cluster."""
    stop_grace: float = Field(default=0.0, ge=0)
    """Seconds that who drives the job has after Ctrl-C to see `stop_requested` and return; 0: it is ended at once."""


class JobSpec(Limits):
    """A checked job, as its master reads it."""

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
        if dataclasses.is_dataclass(config) and not isinstance(config, type):
            return dataclasses.asdict(config)
        return OmegaConf.to_container(config) if OmegaConf.is_config(config) else config


class JobResult(BaseModel):
    """How a run of a job ended."""

    run_id: str
    status: Literal["finished", "failed", "stopped"]
    error: str = ""
    traceback: str = ""
    output: str = ""
    """The last lines that a process which died had written."""
    attempt: int = 1
    """How often the job was started, the restarts included."""
    elapsed: float = 0.0
    """Seconds from submission to the end."""
    peak_memory_bytes: int = 0
    """Largest sum over time of the proportional set sizes of the job's processes."""

    @property
    def exit_code(self) -> int:
        """0 finished, 1 failed, 130 stopped by the user."""
        return {"finished": 0, "failed": 1, "stopped": 130}[self.status]
