"""The memory plan as fields of plan.json."""

from __future__ import annotations

from typing import Any

from plugins.plan.collect import RunMemory
from plugins.plan.pools import memory_pools, node_verdicts
from plugins.plan.text import COLUMNS

_KEYS = ("place", "least", "most", "phases", "there", "verdict")
_ATTRIBUTES = ("name", "least", "most", "phases", "available", "verdict")
"""Attributes of `MemoryPool` for the keys of a pool in plan.json."""


def fields(run: RunMemory) -> dict[str, Any]:
    """Return the verdict on each node, the memory of each role, and the memory pools."""
    memory = [
        {"role": role, "processes": run.count(role)}
        | {name: getattr(estimate, name) for name in COLUMNS}
        | {"total": estimate.total if estimate.is_known else None, "sends": estimate.sends}
        for role, estimate in run.estimates.items()
    ]
    pools = [{key: getattr(pool, name) for key, name in zip(_KEYS, _ATTRIBUTES)} for pool in memory_pools(run)]
    verdicts = {f"node {node}": verdict for node, verdict in enumerate(node_verdicts(run), 1)}
    return {"verdicts": verdicts, "memory": memory, "places": pools}
