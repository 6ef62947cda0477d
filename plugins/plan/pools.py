"""Memory pools of a run: the GPUs that roles share, and the machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from core.plan import ProcessPlan
from plugins.plan.arithmetic import amount_if
from plugins.plan.collect import RunMemory
from plugins.plan.memory import PROCESS_BYTES, phases
from training.launch.machines import assumed
from training.launch.number_ranges import ranges

VERDICTS = ("fits", "not known", "maybe too much", "too much")
"""Verdicts on a pool or a node, from best to worst. A run whose verdict on this machine is "too much" is refused."""


@dataclass(frozen=True)
class MemoryPool:
    """A memory that several processes share: that of a GPU or of a machine."""

    name: str
    fixed_bytes: Mapping[str, int]
    """Minimum number of bytes of each role."""
    least: int
    """Minimum number of bytes of all roles at the same time."""
    most: int
    """Maximum number of bytes of all roles at the same time."""
    available: int | None
    """Size of the memory, or None if it is not known."""
    processes: Mapping[str, int] | None = None
    """Number of processes of each role on a machine. None for a GPU."""
    phases: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of bytes in each phase of a step."""
    is_known: bool = True
    """False if the size of a model in the pool is not known, so that the model may need more memory than computed."""

    @property
    def is_machine(self) -> bool:
        """True for the memory of a machine, False for that of a GPU."""
        return self.processes is not None

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.available is None:
            return "not known"
        if self.least > self.available:
            return "too much"
        if not self.is_known:
            return "not known"
        return "maybe too much" if self.most > self.available else "fits"


def memory_pools(run: RunMemory) -> list[MemoryPool]:
    """Return the pool of a GPU for each group of roles that share one, and the pools of the machines. Machines with
    equal contents are one pool.
    """
    pools = gpu_pools(run)
    machines: dict[tuple[int, int], list[int]] = {}
    each = [machine_pool(run, node) for node in range(run.job.node_num)]
    for node, pool in enumerate(each):
        if pool.processes:
            machines.setdefault((pool.least, pool.most), []).append(node + 1)
    for nodes in machines.values():
        if run.job.node_num == 1 and not assumed():
            name = "this machine"
        else:
            name = f"node {nodes[0]}" if len(nodes) == 1 else f"each of nodes {ranges(nodes)}"
        pools.append(replace(each[nodes[0] - 1], name=name))
    return pools


def gpu_pools(run: RunMemory) -> list[MemoryPool]:
    """Return the pool of a GPU for each group of roles that share one."""
    on_gpu = [role for role in run.estimates if run.is_on_gpu(role)]
    groups = [[role for role in group if role in on_gpu] for group in run.job.collocations]
    groups += [[role] for role in on_gpu if not any(role in group for group in groups)]
    return [_gpu_pool(run, group) for group in groups if group]


def _gpu_pool(run: RunMemory, roles: Sequence[str]) -> MemoryPool:
    estimates = [run.estimates[role] for role in roles]
    base, steps = sum(estimate.base for estimate in estimates), phases(estimates)
    return MemoryPool(
        f"a GPU of {' + '.join(roles)}",
        {role: run.estimates[role].fixed_bytes for role in roles},
        least=max(phase.fixed_bytes for phase in steps),
        most=base + max(phase.most for phase in steps),
        available=run.capacity.device,
        phases={phase.name: base + phase.most for phase in steps},
        is_known=all(estimate.is_known for estimate in estimates),
    )


def machine_pool(run: RunMemory, node: int) -> MemoryPool:
    """Return the pool of a machine. The caller sets its name."""
    hosts = run.hosts_on(node)
    workers = [worker for host in hosts for worker in host.workers]
    counts = Counter(role for role, _ in workers)
    fixed_bytes = {role: _fixed_on_machine(run, role, counts[role], (role, 0) in workers) for role in run.estimates}
    published = sum(estimate.published for role, estimate in run.estimates.items() if (role, 0) in workers)
    resident = _process_bytes(run, hosts, node) + sum(fixed_bytes.values()) + published
    transient = [
        counts[role] * estimate.transient_bytes for role, estimate in run.estimates.items() if not run.is_on_gpu(role)
    ]
    # Roles that do not overlap work one after the other, so the largest one decides.
    working = sum(transient) if run.overlaps else max(transient, default=0)
    # All roles load their models at the same time.
    loading = sum(counts[role] * estimate.loading for role, estimate in run.estimates.items())
    steps = {"start": resident + loading, "work": resident + working}
    return MemoryPool(
        "",
        fixed_bytes,
        least=sum(fixed_bytes.values()),
        most=max(steps.values()),
        available=run.capacity.machine,
        processes=counts,
        phases={name: count for name, count in steps.items() if loading and count > resident},
        # A model of unknown size may be offloaded, asleep or loading here, even if it runs on a GPU.
        is_known=all(run.estimates[role].weights is not None for role in counts),
    )


def _fixed_on_machine(run: RunMemory, role: str, count: int, has_first: bool) -> int:
    """Return the minimum number of bytes that the workers of a role take of one machine's memory."""
    estimate = run.estimates[role]
    each = estimate.host if run.is_on_gpu(role) else estimate.fixed_bytes
    return count * each + amount_if(has_first, estimate.first)


def _process_bytes(run: RunMemory, hosts: Sequence[ProcessPlan], node: int) -> int:
    """Return the bytes of interpreters and libraries on one machine. The first machine also has the driver."""
    # On a GPU the base of an estimate is device memory, so the process on the host is counted instead.
    bases = {role: estimate.base for role, estimate in run.estimates.items()}
    bases |= {role: PROCESS_BYTES["process"] for role in bases if run.is_on_gpu(role)}
    each = [max((bases[role] for role, _ in host.workers), default=0) for host in hosts]
    if run.config.backend == "local":
        # With the local backend all roles run in the process of the driver.
        return max(each)
    return sum(each) + amount_if(node == 0, PROCESS_BYTES["driver"])


def node_verdicts(run: RunMemory) -> list[str]:
    """Return the worst verdict on the memory and the GPUs of each node."""
    on_gpu = gpu_pools(run)
    verdicts: list[str] = []
    for node in range(run.job.node_num):
        roles = {role for host in run.hosts_on(node) for role, _ in host.workers}
        pools = [machine_pool(run, node), *(pool for pool in on_gpu if roles & pool.fixed_bytes.keys())]
        verdicts.append(max((pool.verdict for pool in pools), key=VERDICTS.index))
    return verdicts
