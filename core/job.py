"""What runs where: `JobBuilder` and `RLJobBuilder` build a `Job`, which is checked before anything starts."""

import contextlib
import importlib.util
import symtable
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ValidationError

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
"""Variables that core sets for each worker; a job that sets them is refused."""


class Job(JobSpec):
    """A checked plan. `model_dump_json()` prints all of it; `submit(name)` runs it."""

    @property
    def workloads(self) -> dict[str, RoleSpec]:
        """The roles, under the name by which DLRover's users know them."""
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
        """Run the job to its end, on the Ray of $RAY_ADDRESS, on the one that is initialised, or on one of its own.

        Args:
            job_name: shown in messages; every run has an id of its own, so names may repeat.
            backend: "ray", or "local": everything in this process, without Ray, one workload at a time.
            log_dir: where each process writes its output, `<role>-<rank>.log`; None leaves it to Ray. In local mode
                output goes to the terminal.
            began: seconds since the epoch at which the user started the run, if that was before now; workloads find it
                as `self.began`.
            observers: hear, in this process, of every call when it begins and ends (CallEvent), and of what happens to
                the job (JobEvent). One that raises is switched off with a warning.

        Returns:
            How it ended. A failure of the job is a result, not an exception.

        Raises:
            JobError: the backend cannot run this job.
        """
        self.check_backend(backend)
        return Master(self, job_name, log_dir, began, observers, backend).run()

    def check_backend(self, backend: str) -> None:
        """See that the job can run there.

        Raises:
            JobError: there is no such backend, or a `train` role has several ranks in local mode.
        """
        if backend not in get_args(BackendName):
            raise JobError(f"backend={backend!r}; set one of {', '.join(get_args(BackendName))}")
        wide = [f"{r} has {spec.total}" for r, spec in self.roles.items() if spec.kind == "train" and spec.total > 1]
        if backend == "local" and wide:
            raise JobError(
                f"backend=local runs one rank of each train role, but {', '.join(wide)}; set one, or backend=ray"
            )

    @contextlib.contextmanager
    def running(self, name: str, *, backend: BackendName = "ray") -> Iterator[None]:
        """Start the roles and drive them from here, without a trainer: for notebooks, tests, one-off questions.

        Inside the block `RoleGroup("ACTOR")` and remote-call stubs work in this process. Everything ends with it.
        Nothing is replaced or started again: a death is the error of the call that meets it.
        """
        self.check_backend(backend)
        with Master(self, name, backend=backend, runs=False).running():
            yield


class JobBuilder:
    """Describes a job step by step; `build()` checks it.

    `role(name)` opens a role, `train(path)` or `run(path)` says what it runs, and the calls that follow describe it
    until the next role is opened.
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

    if not TYPE_CHECKING:  # to a type checker every name would exist

        def __getattr__(self, name: str) -> Any:
            alias_of("builder", name, "a job builder", AttributeError)
            return object.__getattribute__(self, name)

    # --- the job

    def config(self: B, config: Any) -> B:
        """What every workload finds as `self.config`."""
        self._config = config
        return self

    def node_num(self: B, nodes: int) -> B:
        """How many machines the job may use."""
        self._node_num = nodes
        return self

    def device_per_node(self: B, devices: int) -> B:
        """How many accelerators each machine has."""
        self._device_per_node = devices
        return self

    def device_type(self: B, kind: DeviceType) -> B:
        """CPU, GPU, or auto: what this machine has."""
        self._device_type = kind
        return self

    def global_env(self: B, env: Mapping[str, str] | None) -> B:
        """Environment variables for every process."""
        self._global_env |= _checked_env(env)
        return self

    def recovery(
        self: B,
        max_restarts: int = 3,
        stall_timeout: float = 0.0,
        stop_grace: float = 0.0,
        placement_timeout: float = 30.0,
    ) -> B:
        """What happens when processes die, hang, or are to stop.

        Args:
            max_restarts: how often all starts again after the death of a rank or of the trainer.
            stall_timeout: seconds without a sign of progress after which a process is taken for hung, and ended;
                0: never. Below 5 it would be shorter than the pauses between two questions.
            stop_grace: seconds that the trainer has after Ctrl-C to see `stop_requested` and return; 0: none.
            placement_timeout: seconds that the job, and a process that takes a lost one's place, wait for resources;
                long enough, an autoscaler can make it.
        """
        if stall_timeout != 0 and not stall_timeout >= _SHORTEST_STALL_S:
            raise JobError(f"stall_timeout={stall_timeout:g}; set at least {_SHORTEST_STALL_S:g}, or 0 for never")
        self._limits = _checked(
            Limits,
            max_restarts=max_restarts,
            stall_timeout=stall_timeout,
            stop_grace=stop_grace,
            placement_timeout=placement_timeout,
        )
        return self

    def with_collocation(self: B, *roles: str) -> B:
        """Let the roles share devices, rank by rank; each gets an equal share."""
        self._collocations.append([str(Role(role)) for role in roles])
        return self

    def with_collocation_all(self: B, *exclude: str) -> B:
        """Let all roles but the excluded ones (and the trainer) share devices."""
        left_out = {Role(role) for role in exclude} | {Role.TRAINER}
        self._collocations.append([role for role in self._roles if role not in left_out])
        return self

    # --- roles

    def role(self: B, name: str) -> B:
        """Open a role; what follows describes it."""
        self._open = str(Role(name))
        return self

    def train(self: B, path: str) -> B:
        """The open role is ranks of `path` that rendezvous and enter collectives together."""
        return self._start(path, "train")

    def run(self: B, path: str) -> B:
        """The open role is independent instances of `path`."""
        return self._start(path, "run")

    def _start(self: B, path: str, kind: Kind) -> B:
        if self._open is None:
            raise JobError(f"{kind}({path!r}) has no role; open one first with role(name)")
        if self._open in self._roles:
            raise JobError(f"role {self._open} is described twice; open another with role(name)")
        self._roles[self._open] = RoleSpec(name=self._open, entrypoint=_normalised(path), kind=kind)
        return self

    def _set(self: B, **values: Any) -> B:
        if self._open is None or self._open not in self._roles:
            raise JobError(
                f"{', '.join(values)} describes a role, but none is open; call train(path) or run(path) first"
            )
        self._roles[self._open] = _checked(RoleSpec, **dict(self._roles[self._open]) | values)
        return self

    def resource(
        self: B, cpu: float = 1.0, accelerator: float = 0.0, memory: int = 0, threads: int = 0, **custom: float
    ) -> B:
        """What each worker of the open role is given: cores, devices (or a share of one), MB, threads (see `Resource`).

        `custom` are resources that the cluster's nodes were started with, under their own names.
        """
        for name in custom:
            alias_of("resource", name, "resource()", JobError)
        given = {"cpu": cpu, "accelerator": accelerator, "memory": memory, "threads": threads, "custom": custom}
        return self._set(resource=_checked(Resource, **given))

    def concurrency(self: B, calls: int) -> B:
        """How many calls to async methods of one worker of the open role may run beside each other."""
        return self._set(concurrency=calls)

    def total(self: B, count: int) -> B:
        """How many workers the open role has, on any nodes."""
        return self._set(nnodes=1, nproc_per_node=count)

    def nnodes(self: B, nodes: int) -> B:
        """Over how many machines the ranks of the open role are spread."""
        return self._set(nnodes=nodes)

    def nproc_per_node(self: B, count: int) -> B:
        """How many ranks of the open role are on each of its machines."""
        return self._set(nproc_per_node=count)

    def env(self: B, env: Mapping[str, str] | None) -> B:
        """Environment variables for the open role's processes."""
        current = self._roles.get(self._open or "")
        return self._set(env=(current.env if current else {}) | _checked_env(env))

    def process(self: B, name: str) -> B:
        """The open role shares processes, rank by rank, with all roles of the same process name."""
        return self._set(process=name)

    def max_restarts(self: B, count: int) -> B:
        """How often instances of the open role may be lost before all starts again; of `run` roles only."""
        return self._set(max_restarts=count)

    # --- the check

    def build(self) -> Job:
        """Check the description and make the plan.

        Raises:
            JobError: it cannot work; the message names what to set.
        """
        if not self._roles:
            raise JobError("the job has no role; add one with role(name).run('package.module:Class')")
        found = detect_devices()
        kind = ("GPU" if found else "CPU") if self._device_type == "auto" else self._device_type
        devices = self._device_per_node if self._device_per_node is not None else (found if kind == "GPU" else 0)
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
    """A JobBuilder that knows the roles of reinforcement learning, and that an actor is needed."""

    def trainer(self: B, path: str) -> B:
        """The one instance that drives the others; the job ends when it does."""
        return self.role(Role.TRAINER).run(path)

    def actor(self: B, path: str) -> B:
        """The ranks that train the policy."""
        return self.role(Role.ACTOR).train(path)

    def critic(self: B, path: str) -> B:
        """The ranks that train the value function."""
        return self.role(Role.CRITIC).train(path)

    def rollout(self: B, path: str) -> B:
        """The instances that sample from the policy."""
        return self.role(Role.ROLLOUT).run(path)

    def reference(self: B, path: str) -> B:
        """The instances that hold the frozen policy."""
        return self.role(Role.REFERENCE).run(path)

    def reward(self: B, path: str) -> B:
        """The instances that score responses."""
        return self.role(Role.REWARD).run(path)

    def build(self) -> Job:
        """As JobBuilder.build, and an ACTOR must be there."""
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
        raise JobError(f"env sets {', '.join(reserved)}, which core sets for each worker; leave them out")
    return env


def _normalised(path: str) -> str:
    """`a.b:C` from `a.b:C`, `a.b::C` or `a.b.C`."""
    module, _, name = path.replace("::", ":").partition(":") if ":" in path else path.rpartition(".")
    if not module or not name.isidentifier():
        raise JobError(f"{path!r} names no class; write it as 'package.module:Class'")
    return f"{module}:{name}"


def _check_entrypoint(spec: RoleSpec) -> None:
    """See that the class is there without running its module: importing it may take seconds (torch)."""
    module, _, name = spec.entrypoint.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        found = None
    if found is None:
        raise JobError(f"role {spec.name}: there is no module {module!r}; correct {spec.entrypoint!r}")
    if found.origin is None or not found.origin.endswith(".py"):
        return
    symbols = symtable.symtable(Path(found.origin).read_text(encoding="utf-8"), found.origin, "exec").get_symbols()
    # An assignment or an import may bind the name too: `Worker = ray.remote(Plain)`.
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if name not in names:
        raise JobError(f"role {spec.name}: {found.origin} has no class {name!r}; it has {', '.join(sorted(names))}")
