"""The node of each worker of a job, computed before it starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from core import Job
from training.launch.machines import assumed, counted
from training.launch.number_ranges import ranges


def nodes_of(job: Job) -> list[int]:
    """Return the node of each bundle of a job, from 0. Ray may choose another layout.

    Bundles of roles that are spread over nodes are placed first, and large bundles before small ones.

    Raises:
        ValueError: a role fits on no node.
    """
    bundles = job.placement.bundles
    devices = job.device_per_node if job.device_type == "GPU" else 0
    together: dict[object, list[int]] = {}
    for index, bundle in enumerate(bundles):
        together.setdefault(bundle.machine or index, []).append(index)
    # Shares such as 1/3 were rounded down, so three of them may sum to a little less than one device.
    sizes = {key: math.ceil(sum(bundles[i].accelerator for i in indices) - 1e-3) for key, indices in together.items()}
    # Large bundles are placed first: the small ones still fit into the gaps, but not the other way round.
    nodes = [0] * len(bundles)
    node_num = getattr(assumed(), "nodes", None) or job.node_num
    used = [0] * node_num
    taken: set[tuple[str, int]] = set()
    for key in sorted(together, key=lambda key: (isinstance(key, int), -sizes[key])):
        first = together[key][0]
        size = sizes[key]
        role, _ = bundles[first].machine or ("", 0)
        free = [node for node, full in enumerate(used) if full + size <= devices and (role, node) not in taken]
        if not free:
            raise ValueError(_no_room(job, first, size, used, devices))
        used[free[0]] += size
        # A role that spans several machines has exactly one bundle on each of them.
        if role:
            taken.add((role, free[0]))
        for index in together[key]:
            nodes[index] = free[0]
    return nodes


def _no_room(job: Job, bundle: int, size: int, used: Sequence[int], devices: int) -> str:
    """Return an error message that names the role that fits on no node, its request, and the free devices."""
    owners = dict.fromkeys(role for host in job.placement.hosts if host.bundle == bundle for role, _ in host.workers)
    widest = max(owners, key=lambda role: job.roles[role].nnodes)
    nodes = counted(len(used), "node")
    count = job.roles[widest].nnodes
    if count > len(used):
        return f"{widest} requests {count} nodes, but the run has {nodes}; lower its number of nodes"
    left = ", ".join(str(devices - full) for full in used)
    return (
        f"{' + '.join(owners)} requests {counted(size, 'device')} on one node, but no node has as many free devices. "
        f"Free devices of {nodes} with {devices} each: {left}. Lower the counts, colocate roles, or set more nodes"
    )


def node_lines(job: Job, nodes: Sequence[int]) -> list[str]:
    """Describe the workers of each node in the layout of `nodes_of`, in one line per node."""
    lines = list[str]()
    for node in range(job.node_num):
        ranks: dict[str, list[int]] = {}
        for host in job.placement.hosts:
            if nodes[host.bundle] == node:
                for role, rank in host.workers:
                    ranks.setdefault(role, []).append(rank)
        workers = ", ".join(f"{role.lower()} {ranges(of_role)}" for role, of_role in ranks.items())
        used = sum(bundle.accelerator for bundle, on in zip(job.placement.bundles, nodes, strict=True) if on == node)
        gpus = f"; {math.ceil(used - 1e-3)} of {job.device_per_node} GPUs" if job.device_type == "GPU" else ""
        lines.append(f"node {node + 1}: {workers or 'nothing'}{gpus}")
    return lines
