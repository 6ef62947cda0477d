"""Options to change when the memory of a run does not suffice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plugins.plan.collect import RunMemory
from plugins.plan.memory import MemoryEstimate
from plugins.plan.pools import MemoryPool
from training.launch.plan import short_value
from training.tracking import redact
from training.tracking.serialization import flat

_PROCESS_COUNTS = ("ranks", "ranks_per_node", "references", "rewards", "engines", "devices_per_node")
_MOST = 4
"""Maximum number of options that a message names."""


@dataclass
class _Changes:
    """Changes of options that reduce the memory of a pool. Options are named by the last part of their names."""

    settings: dict[str, object] = field(default_factory=dict)
    """Options to set to these values."""
    lower: list[str] = field(default_factory=list)
    """Limits to lower. Options that are not set are not named."""
    shares: list[str] = field(default_factory=list)
    """Shares of memory to lower, even if they have their default values."""
    fewer_processes: bool = False
    without_average: bool = False
    frozen_layout: str = ""
    """Layout to set for frozen models whose layout is "whole"."""

    def advice(self, name: str, value: Any) -> str:
        """Return an assignment such as `train.zero_stage=3`, or an empty string if the option need not change."""
        last = name.rpartition(".")[2]
        # These values are False, True and the ZeRO stages below 3. Any other value was chosen for another reason.
        if last in self.settings and value in (0, 1, 2) and value != self.settings[last]:
            return f"{name}={short_value(self.settings[last])}"
        if self.without_average and name == "train.ema_beta" and value is not None:
            return f"{name}=null"
        is_count = self.fewer_processes and last.endswith(_PROCESS_COUNTS) and (value or 0) > 1
        is_budget = last in self.lower and value is not None
        return f"{name} lower" if is_count or is_budget or last in self.shares else ""


def remedy(run: RunMemory, pool: MemoryPool) -> str:
    """Return the options to set for a pool that may not suffice."""
    estimates = [run.estimates[role] for role in pool.fixed_bytes]
    changes = _Changes(settings={"gradient_checkpointing": True}, lower=["max_tokens"])
    if any(_is_trained(estimate) for estimate in estimates):
        changes.settings["lora_rank"] = 16
    return _advice(run, pool, _for_pool(changes, run, pool, estimates))


def role_remedy(run: RunMemory, pool: MemoryPool, role: str) -> str:
    """Return the options to set for a pool that is too small and in which `role` uses the largest part."""
    estimate = run.estimates[role]
    count = 1 if pool.processes is None else pool.processes[role]
    changes = _Changes()
    # Adapters remove gradients and optimizer states only. They do not help if the weights alone are too large.
    weights = estimate.weights or 0
    if _is_trained(estimate) and weights * count < (pool.available or 0):
        changes.settings["lora_rank"] = 16
    return _advice(run, pool, _for_pool(changes, run, pool, [estimate]))


def engine_remedy(run: RunMemory, estimate: MemoryEstimate) -> str:
    """Return the options to set for an engine whose share of a GPU is smaller than its weights need."""
    raised: list[str] = []
    if estimate.share + estimate.short <= (run.capacity.device or 0):
        raised.append("gpu_memory")
    # An engine in a process that also trains has one device, so tensor parallelism is not available to it.
    if not estimate.optimizer:
        raised.append("tensor_parallel")
    names = [name for name in flat(redact(run.config)) if name.rpartition(".")[2] in raised]
    return _or_smaller_model(run, [f"{name} higher" for name in names])


def _is_trained(estimate: MemoryEstimate) -> bool:
    return estimate.optimizer != 0 or (estimate.host > 0 and not estimate.cache)


def _for_pool(changes: _Changes, run: RunMemory, pool: MemoryPool, estimates: Sequence[MemoryEstimate]) -> _Changes:
    """Add the changes that reduce the memory in this kind of pool."""
    has_cache = any(estimate.cache and not estimate.grows for estimate in estimates)
    changes.without_average = pool.is_machine
    if pool.is_machine and run.has_gpus:
        # The host holds states that were moved off the GPUs, so more of them must stay on the GPUs.
        changes.settings = dict.fromkeys(("adam_offload", "engines_sleep", "learners_sleep"), False)
        changes.lower = []
        return changes
    if pool.is_machine:
        changes.fewer_processes = True
        if has_cache:
            changes.lower.append("cpu_cache_gb")
        return changes
    if any(_is_trained(estimate) for estimate in estimates):
        changes.settings |= {"zero_stage": 3, "adam_offload": True}
    if has_cache:
        changes.shares = ["gpu_memory"]
    parts = [part for estimate in estimates for part in estimate.parts or (estimate,)]
    if any(part.weights and not (part.optimizer or part.host or part.generates) for part in parts):
        # Sharding needs several processes.
        is_shared = max(run.count(role) for role in pool.fixed_bytes) > 1
        changes.frozen_layout = "sharded" if is_shared else "offloaded"
    return changes


def _advice(run: RunMemory, pool: MemoryPool, changes: _Changes) -> str:
    """Write the changes as text, for the options that the recipe has."""
    first: list[str] = []
    others: list[str] = []
    for name, value in flat(redact(run.config)).items():
        if changes.frozen_layout and name.rpartition(".")[2] == "frozen_models" and value == "whole":
            first.append(f"{name}={changes.frozen_layout}")
        elif advice := changes.advice(name, value):
            others.append(advice)
    texts = [*first, *others][:_MOST]
    if run.has_gpus and not pool.is_machine:
        texts.append("more GPUs")
    return _or_smaller_model(run, texts)


def _or_smaller_model(run: RunMemory, texts: Sequence[str]) -> str:
    options = flat(redact(run.config))
    model = "model.path" if options.get("model.path") else "the model"
    smaller = f"a smaller model ({model})"
    return f"set {', '.join(texts)}, or {smaller}" if texts else f"set {smaller}"
