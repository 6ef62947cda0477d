"""Memory estimates of all roles of a run, collected from its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.models.size import model_size
from components.registry import find
from components.train.config import FrozenConfig, TrainConfig
from core import Job
from core.plan import ProcessPlan
from plugins.plan.capacity import Capacity
from plugins.plan.memory import MemoryEstimate, frozen, learning, sampling, together
from training.launch.model_use import ModelUse
from training.launch.plan import Plan


@dataclass(kw_only=True)
class RunMemory:
    """Memory that a run needs, and the memory that its machines have."""

    job: Job
    config: Any
    """Configuration with all automatic values resolved."""
    nodes: Sequence[int]
    """Node of each bundle of the job."""
    estimates: Mapping[str, MemoryEstimate]
    """Memory of one process of each role of the job."""
    capacity: Capacity
    overlaps: bool = False
    """True if roles work at the same time."""

    @property
    def has_gpus(self) -> bool:
        """True if the job runs on GPUs."""
        return self.job.device_type == "GPU"

    @property
    def is_known(self) -> bool:
        """True if no part of an estimate is unknown."""
        return all(estimate.is_known for estimate in self.estimates.values())

    def count(self, role: str) -> int:
        """Return the number of processes of a role."""
        return self.job.placement.processes[role]

    def is_on_gpu(self, role: str) -> bool:
        """Return True if the processes of a role compute on a GPU."""
        return self.job.placement.devices[role] > 0

    def hosts_on(self, node: int) -> list[ProcessPlan]:
        """Return the processes on a node."""
        return [host for host in self.job.placement.hosts if self.nodes[host.bundle] == node]


def collect(plan: Plan) -> RunMemory:
    """Estimate the memory of each role of a planned run."""
    job = plan.job
    capacity = Capacity.of_machine(job.device_type == "GPU", job.node_num)
    uses: dict[str, list[MemoryEstimate]] = {role: [] for role in job.placement.processes}
    # A role may have several models, for example a policy and its rollout engine in one process.
    for use in plan.models:
        estimate = estimate_use(use, job, plan.longest, capacity.device)
        if use.publishes and (with_routes := find("routing replay plan", "memory")):
            estimate = with_routes(estimate, use.path, plan.config, plan.longest)
        uses[use.role].append(estimate)
    estimates = {role: together(*of_role) if of_role else MemoryEstimate() for role, of_role in uses.items()}
    return RunMemory(
        job=job, config=plan.config, nodes=plan.nodes, estimates=estimates, capacity=capacity, overlaps=plan.overlaps
    )


def estimate_use(use: ModelUse, job: Job, longest: int, device_bytes: int | None) -> MemoryEstimate:
    """Estimate the memory of one process with one model.

    Args:
        use: the model and its use.
        job: the job of the process.
        longest: maximum number of tokens of a sequence.
        device_bytes: memory of a GPU, or None if it is not known.
    """
    size = model_size(use.path)
    processes = job.placement.processes[use.role]
    gpu = job.device_type == "GPU"
    if isinstance(use.config, TrainConfig):
        flags = {"publishes": use.publishes, "has_head": use.has_head, "sleeps": use.sleeps}
        return learning(size, use.config, processes, longest, use.sequences, gpu=gpu, **flags)
    if isinstance(use.config, FrozenConfig):
        limits, layout, precision = use.config.limits, use.config.layout, use.config.precision
        rows = min(limits.max_sequences or use.sequences, use.sequences)
        # A sequence longer than the limit is a micro-batch of its own.
        tokens = max(longest, min(limits.max_tokens, rows * longest))
        return frozen(size, precision, tokens=tokens, gpu=gpu, has_head=use.has_head, layout=layout, ranks=processes)
    return sampling(size, use.config, -(-use.sequences // processes), longest, device_bytes, gpu=gpu)
