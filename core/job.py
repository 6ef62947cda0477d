"""Job description: `JobBuilder` and `RLJobBuilder` build a `Job`, which is checked before anything starts."""

import contextlib
import importlib.util
import symtable
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError

from core.backends import BackendName
from core.errors import JobError
from core.members import Kind
from core.migration import alias_of
from core.observers import Observer
from core.placement import detect_devices, plan
from core.plan import JobResult, JobSpec, Limits, Resource, RoleSpec
from core.roles import Role
from core.supervise.master import Master

DeviceType = Literal["auto", "CPU", "GPU"]
B = TypeVar("B", bound="JobBuilder")
M = TypeVar("M", bound=BaseModel)

_SHORTEST_STALL_S = 5.0

RESERVED_ENVIRONMENT = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
)
"""Environment variables reserved for core. A job that sets one is rejected."""


class Job(JobSpec):
    """A checked job. `model_dump_json()` serialises it, `submit(name)` runs it."""

    master: type[Master] = Field(default=Master, exclude=True)
    """Class that runs the job. A plug-in may set a subclass."""

    @property
    def workloads(self) -> dict[str, RoleSpec]:
        """DLRover's name for `roles`."""
        return self.roles

    def submit(
        self,
        job_name: str = "job",
        *,
        backend: BackendName = "ray",
        log_dir: Path | None = None,
        began: float | None = None,
        observers: Sequence[Observer] = (),
    ) -> JobResult:
        """Run the job to its end.

        The job runs on the Ray cluster at $RAY_ADDRESS, or on the Ray that this process has initialised, or else on a
        cluster that is started for the job.

        Args:
            job_name: name shown in messages. Names may repeat, because every run has a unique id.
            backend: "ray", or "local", which runs all workloads in this process without Ray, one at a time.
            log_dir: folder for the output of each process, `<role>-<rank>.log`. None leaves the output to Ray. In
                local mode the output goes to the terminal.
            began: start time of the run in seconds since the epoch, if earlier than now. Workloads read it as
                `self.began`.
            observers: callbacks, called in this process with a CallEvent at the start and end of every call and with a
                JobEvent for changes of the job. An observer that raises is removed with a warning.

        Returns:
            The result of the run. A failure of the job is a result, not an exception.

        Raises:
            JobError: the backend cannot run this job.
        """
        self.check_backend(backend)
        return self.master(self, job_name, log_dir, began, observers, backend).run()

    def check_backend(self, backend: str) -> None:
        """Check that the job can run on a backend.

        Raises:
            JobError: the backend does not exist, or a `train` role has several ranks in local mode.
        """
        if backend not in get_args(BackendName):
            raise JobError(f"backend={backend!r} is unknown; set one of {', '.join(get_args(BackendName))}")
        wide = [f"{r} has {spec.total}" for r, spec in self.roles.items() if spec.kind == "train" and spec.total > 1]
        if backend == "local" and wide:
            raise JobError(f"backend=local runs one rank per train role, but {', '.join(wide)}; set 1, or backend=ray")

    @contextlib.contextmanager
    def running(self, name: str, *, backend: BackendName = "ray") -> Iterator[None]:
        """Start the roles and call them from this process, without a trainer. For notebooks, tests and experiments.

        `RoleGroup("ACTOR")` and remote-call stubs work in this process inside the block. All roles end with the block.
        Nothing is replaced or restarted: a call to a dead worker raises an error.
        """
        self.check_backend(backend)
        with Master(self, name, backend=backend, runs=False).running():
            yield


class JobBuilder:
    """Builder of a job description. `build()` checks the description and returns a `Job`.

    `role(name)` opens a role, and `train(path)` or `run(path)` sets its class. The following calls configure this role
    until another role is opened.
    """

    def __init__(self) -> None:
        self._config: Any = None
        self._node_num = 1
        self._device_per_node: int | None = None
        self._device_type: DeviceType = "auto"
        self._global_env: dict[str, str] = {}
        self._roles: dict[str, RoleSpec] = {}
        self._open: str | None = None
        self._collocations: list[list[str]] = []
        self._limits = Limits()

    if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts any name

        def __getattr__(self, name: str) -> Any:
            alias_of("builder", name, "a job builder", AttributeError)
            return object.__getattribute__(self, name)

    # --- the job

    def config(self: B, config: Any) -> B:
        """Set the configuration that every workload reads as `self.config`."""
        self._config = config
        return self

    def node_num(self: B, nodes: int) -> B:
        """Set the maximum number of nodes of the job."""
        self._node_num = nodes
        return self

    def device_per_node(self: B, devices: int) -> B:
        """Set the number of accelerators per node."""
        self._device_per_node = devices
        return self

    def device_type(self: B, kind: DeviceType) -> B:
        """Set the device type: CPU, GPU, or auto (GPU if this machine has one)."""
        self._device_type = kind
        return self

    def global_env(self: B, env: Mapping[str, str] | None) -> B:
        """Add environment variables for every process."""
        self._global_env |= _checked_env(env)
        return self

    def recovery(
        self: B,
        max_restarts: int = 3,
        stall_timeout: float = 0.0,
        stop_grace: float = 0.0,
        placement_timeout: float = 30.0,
    ) -> B:
        """Set the limits for restarts, hung processes and stop requests.

        Args:
            max_restarts: maximum number of restarts of the whole job after a rank or the trainer dies.
            stall_timeout: seconds without progress after which a process counts as hung and is killed. 0 disables it.
                The minimum is 5, because the status of processes is polled every 2 seconds.
            stop_grace: seconds that the trainer has after Ctrl-C to see `stop_requested` and return. 0 stops at once.
            placement_timeout: seconds that the job, and the replacement of a process, wait for free resources. Set it
                long enough for an autoscaler to add nodes.

        Raises:
            JobError: a value is out of range.
        """
        if stall_timeout != 0 and not stall_timeout >= _SHORTEST_STALL_S:
            raise JobError(f"stall_timeout={stall_timeout:g}; set at least {_SHORTEST_STALL_S:g}, or 0 to disable it")
        self._limits = _checked(
            Limits,
            max_restarts=max_restarts,
            stall_timeout=stall_timeout,
            stop_grace=stop_grace,
            placement_timeout=placement_timeout,
        )
        return self

    def with_collocation(self: B, *roles: str) -> B:
        """Let the roles share devices, rank by rank, in equal shares."""
        self._collocations.append([str(Role(role)) for role in roles])
        return self

    def with_collocation_all(self: B, *exclude: str) -> B:
        """Let all roles share devices except the excluded ones and the trainer."""
        excluded = {Role(role) for role in exclude} | {Role.TRAINER}
        self._collocations.append([role for role in self._roles if role not in excluded])
        return self

    # --- roles

    def role(self: B, name: str) -> B:
        """Open a role. The following calls configure it."""
        self._open = str(Role(name))
        return self

    def train(self: B, path: str) -> B:
        """Set the class of the open role. Its workers are ranks that rendezvous and enter collectives together."""
        return self._start(path, "train")

    def run(self: B, path: str) -> B:
        """Set the class of the open role. Its workers are independent instances."""
        return self._start(path, "run")

    def _start(self: B, path: str, kind: Kind) -> B:
        if self._open is None:
            raise JobError(f"{kind}({path!r}) has no role; open one first with role(name)")
        if self._open in self._roles:
            raise JobError(f"role {self._open} is described twice; open another one with role(name)")
        self._roles[self._open] = RoleSpec(name=self._open, entrypoint=_normalised(path), kind=kind)
        return self

    def _set(self: B, **values: Any) -> B:
        if self._open is None or self._open not in self._roles:
            raise JobError(f"{', '.join(values)} set, but no role is open; call train(path) or run(path) first")
        self._roles[self._open] = _checked(RoleSpec, **dict(self._roles[self._open]) | values)
        return self

    def resource(
        self: B, cpu: float = 1.0, accelerator: float = 0.0, memory: int = 0, threads: int = 0, **custom: float
    ) -> B:
        """Set the resources of each worker of the open role.

        Args:
            cpu: number of cores.
            accelerator: number of devices, or a share of one.
            memory: memory to reserve in MB.
            threads: number of threads of the maths libraries; see `Resource.threads`.
            custom: custom resources, by the names with which the nodes of the cluster were started.
        """
        for name in custom:
            alias_of("resource", name, "resource()", JobError)
        amounts = {"cpu": cpu, "accelerator": accelerator, "memory": memory, "threads": threads, "custom": custom}
        return self._set(resource=_checked(Resource, **amounts))

    def concurrency(self: B, calls: int) -> B:
        """Set the maximum number of concurrent calls to async methods of one worker of the open role."""
        return self._set(concurrency=calls)

    def total(self: B, count: int) -> B:
        """Set the number of workers of the open role, on any nodes."""
        return self._set(nnodes=1, nproc_per_node=count)

    def nnodes(self: B, nodes: int) -> B:
        """Set the number of nodes over which the ranks of the open role are spread."""
        return self._set(nnodes=nodes)

    def nproc_per_node(self: B, count: int) -> B:
        """Set the number of ranks of the open role per node."""
        return self._set(nproc_per_node=count)

    def env(self: B, env: Mapping[str, str] | None) -> B:
        """Add environment variables for the processes of the open role."""
        current = self._roles.get(self._open or "")
        return self._set(env=getattr(current, "env", {}) | _checked_env(env))

    def process(self: B, name: str) -> B:
        """Let the open role share processes, rank by rank, with all roles of the same process name."""
        return self._set(process=name)

    def max_restarts(self: B, count: int) -> B:
        """Set the maximum number of lost instances of this role before the job restarts (`run` roles only)."""
        return self._set(max_restarts=count)

    # --- the check

    def build(self) -> Job:
        """Check the description, plan the placement, and return the job.

        Raises:
            JobError: the description is invalid. The message names the setting to change.
        """
        if not self._roles:
            raise JobError("the job has no role; add one with role(name).run('package.module:Class')")
        detected = detect_devices()
        kind = self._device_type
        if kind == "auto":
            kind = "GPU" if detected else "CPU"
        devices = self._device_per_node
        if devices is None:
            devices = {"GPU": detected}.get(kind, 0)
        for spec in self._roles.values():
            _check_entrypoint(spec)
        placement = plan(self._roles, self._collocations, kind, self._node_num, devices)
        return _checked(
            Job,
            device_type=kind,
            node_num=self._node_num,
            device_per_node=devices,
            roles=self._roles,
            placement=placement,
            collocations=self._collocations,
            global_env=self._global_env,
            **self._limits.model_dump(),
            config=self._config,
        )


class RLJobBuilder(JobBuilder):
    """A JobBuilder with the roles of reinforcement learning. An ACTOR is required."""

    def trainer(self: B, path: str) -> B:
        """Open the TRAINER role: one instance that calls the other roles. The job ends when it returns."""
        return self.role(Role.TRAINER).run(path)

    def actor(self: B, path: str) -> B:
        """Open the ACTOR role: ranks that train the policy."""
        return self.role(Role.ACTOR).train(path)

    def critic(self: B, path: str) -> B:
        """Open the CRITIC role: ranks that train the value function."""
        return self.role(Role.CRITIC).train(path)

    def rollout(self: B, path: str) -> B:
        """Open the ROLLOUT role: instances that sample from the policy."""
        return self.role(Role.ROLLOUT).run(path)

    def reference(self: B, path: str) -> B:
        """Open the REFERENCE role: instances that hold the frozen policy."""
        return self.role(Role.REFERENCE).run(path)

    def reward(self: B, path: str) -> B:
        """Open the REWARD role: instances that score responses."""
        return self.role(Role.REWARD).run(path)

    def build(self) -> Job:
        """Check the description as `JobBuilder.build` does, and that the job has an ACTOR.

        Raises:
            JobError: the description is invalid, or has no ACTOR.
        """
        if Role.ACTOR not in self._roles:
            raise JobError("a reinforcement-learning job needs an actor; add .actor('package.module:Class')")
        return super().build()


def _checked(model: type[M], **values: Any) -> M:
    try:
        return model(**values)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise JobError(f"{'.'.join(map(str, wrong['loc']))}={wrong['input']!r}: {wrong['msg']}") from error


def _checked_env(env: Mapping[str, str] | None) -> dict[str, str]:
    env = dict(env or {})
    reserved = sorted(RESERVED_ENVIRONMENT & set(env))
    if reserved:
        raise JobError(f"env sets {', '.join(reserved)}, which core sets for each worker; remove them from env")
    return env


def _normalised(path: str) -> str:
    """Return the form `a.b:C` of a path `a.b:C`, `a.b::C` or `a.b.C`."""
    module, _, name = path.replace("::", ":").partition(":") if ":" in path else path.rpartition(".")
    if not module or not name.isidentifier():
        raise JobError(f"{path!r} is not the path of a class; write it as 'package.module:Class'")
    return f"{module}:{name}"


def _check_entrypoint(spec: RoleSpec) -> None:
    """Check that the class of a role exists, without importing its module."""
    # An import may take seconds (torch), and would run the user's code in the driver.
    module, _, name = spec.entrypoint.partition(":")
    try:
        module_spec = importlib.util.find_spec(module)
    except ImportError:
        module_spec = None
    if module_spec is None:
        raise JobError(f"role {spec.name}: module {module!r} was not found; correct {spec.entrypoint!r}")
    path = module_spec.origin
    if path is None or not path.endswith(".py"):
        return
    symbols = symtable.symtable(Path(path).read_text(encoding="utf-8"), path, "exec").get_symbols()
    # An assignment or an import may bind the name too: `Worker = ray.remote(Plain)`.
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if name not in names:
        raise JobError(f"role {spec.name}: {path} has no class {name!r}; it has {', '.join(sorted(names))}")
