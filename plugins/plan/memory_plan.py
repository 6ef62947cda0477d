"""The memory plan of a run: see `training.launch.plan.MemoryPlan`."""

from __future__ import annotations

from typing import Any

from plugins.plan.collect import RunMemory, collect
from plugins.plan.json_fields import fields
from plugins.plan.pools import MemoryPool, memory_pools, node_verdicts
from plugins.plan.remedies import engine_remedy, role_remedy
from plugins.plan.text import columns, format_bytes, paragraphs
from training.launch.plan import Plan


def plan_memory(plan: Plan) -> MemoryPlan:
    """Compute the memory of a planned run."""
    return MemoryPlan(collect(plan))


class MemoryPlan:
    """Memory of a run as text, as JSON, and compared with the memory of its machines."""

    def __init__(self, run: RunMemory) -> None:
        """
        Args:
            run: the memory that the run needs, and that of its machines.
        """
        self.run = run

    def check(self) -> None:
        """Check that the fixed memory fits: weights, gradients, optimizer states, and caches that are allocated at the
        start. If the memory of other machines is a guess, only the GPUs are checked.

        Raises:
            ValueError: it does not fit. The message names the options to change.
        """
        for role, estimate in self.run.estimates.items():
            if estimate.short:
                raise ValueError(
                    f"it cannot fit: {role}'s engine may take {format_bytes(estimate.share)} of a GPU, and needs "
                    f"{format_bytes(estimate.share + estimate.short)} for its weights, its context and one sequence; "
                    f"{engine_remedy(self.run, estimate)}"
                )
        for pool in memory_pools(self.run):
            # Other machines may have more memory than this one, so a guess refuses nothing.
            is_guess = self.run.capacity.is_guess and pool.is_machine
            if pool.verdict == "too much" and not is_guess:
                raise ValueError(_refusal(self.run, pool))

    def columns(self) -> dict[str, list[str]]:
        """See `training.launch.plan.MemoryPlan.columns`."""
        return columns(self.run)

    def verdicts(self) -> list[str]:
        """See `training.launch.plan.MemoryPlan.verdicts`."""
        return node_verdicts(self.run)

    def paragraphs(self) -> list[tuple[str, str]]:
        """See `training.launch.plan.MemoryPlan.paragraphs`."""
        return paragraphs(self.run)

    def fields(self) -> dict[str, Any]:
        """See `training.launch.plan.MemoryPlan.fields`."""
        return fields(self.run)


def _refusal(run: RunMemory, pool: MemoryPool) -> str:
    """Return an error message that names the role with the largest share of a pool."""
    role = max(pool.fixed_bytes, key=lambda name: pool.fixed_bytes[name])
    estimate = run.estimates[role]
    shown = {name: getattr(estimate, name) for name in ("weights", "gradients", "optimizer", "cache")}
    # A cache that grows is not part of the fixed memory.
    if estimate.grows:
        del shown["cache"]
    # For a role on a GPU, the host only holds offloaded and sleeping states.
    if pool.is_machine and run.is_on_gpu(role):
        shown = {"offloaded or asleep": estimate.host, "moving average on the first": estimate.first}
    parts = ", ".join(f"{name} {format_bytes(value)}" for name, value in shown.items() if value)
    count = run.count(role) if pool.processes is None else pool.processes[role]
    return (
        f"it cannot fit: {pool.name} would hold {format_bytes(pool.least)}, and has {format_bytes(pool.available)}. "
        f"The most is {role}'s, {count} x ({parts}); {role_remedy(run, pool, role)}"
    )
