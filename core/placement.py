"""From roles to bundles and processes: who shares a device, who shares a process, and whether it fits."""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from core.errors import JobError
from core.plan import BundlePlan, HostPlan, Placement, Resource, RoleSpec

assumed_devices: ContextVar[int | None] = ContextVar("assumed_devices", default=None)
"""GPUs of the machines that a job is planned for, where that is not this one."""


def detect_devices() -> int:
    """How many NVIDIA GPUs this machine shows, or the assumed one, without importing anything heavy."""
    assumed = assumed_devices.get()
    if assumed is not None:
        return assumed
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def plan(
    roles: Mapping[str, RoleSpec], collocations: Sequence[Sequence[str]], device_type: str, nodes: int, devices: int
) -> Placement:
    """Lay the roles out.

    Each worker gets a bundle of its own; the ranks of a node share one, so that they stay on one node. Collocated
    roles share bundles rank by rank, and the accelerator in equal parts. Roles of one process share a host. A role of
    several nodes has as many ranks on each; which machines these are is found when the job starts.

    Raises:
        JobError: a collocation or a process cannot be formed, or there are fewer devices than are asked for.
    """
    _check_collocations(roles, collocations)
    group_of = {role: index for index, group in enumerate(collocations) for role in group}
    bundles: list[BundlePlan] = []
    bundle_of: dict[tuple[str, int], int] = {}
    share: dict[str, float] = {}
    asked: defaultdict[str, list[float]] = defaultdict(list)
    for name, spec in roles.items():
        group = collocations[group_of[name]] if name in group_of else [name]
        if name != group[0]:
            continue
        for role in group:
            wanted = roles[role].resource.accelerator if len(group) == 1 else math.floor(1e4 / len(group)) / 1e4
            share[role] = wanted if device_type == "GPU" else 0.0
        per_bundle = spec.nproc_per_node if len(group) == 1 and spec.kind == "train" else 1
        widest = max((roles[role] for role in group), key=lambda spec: spec.nnodes)
        for first in range(0, spec.total, per_bundle):
            for role in group:
                bundle_of |= {(role, rank): len(bundles) for rank in range(first, first + per_bundle)}
            machine = (widest.name, first // widest.nproc_per_node) if widest.nnodes > 1 else None
            each = sum(share[role] for role in group) * per_bundle
            total = _total([roles[role] for role in group], per_bundle)
            bundles.append(BundlePlan(accelerator=round(each, 4), machine=machine, **total))
            asked[" + ".join(group)].append(each)
    hosts = _hosts(roles, bundle_of, share)
    if device_type == "GPU":
        _check_capacity(asked, nodes, devices)
    return Placement(
        processes={name: spec.total for name, spec in roles.items()},
        devices={name: round(share[name] * spec.total, 4) for name, spec in roles.items()},
        bundles=bundles,
        hosts=hosts,
    )


def _total(specs: Sequence[RoleSpec], workers: int = 1) -> dict[str, Any]:
    """What so many workers of each of these roles are given together."""
    resources = [spec.resource for spec in specs for _ in range(workers)]
    custom: Counter[str] = Counter()
    for resource in resources:
        custom.update(resource.custom)
    return {"cpu": sum(r.cpu for r in resources), "memory": sum(r.memory for r in resources), "custom": custom}


def _check_collocations(roles: Mapping[str, RoleSpec], collocations: Sequence[Sequence[str]]) -> None:
    seen: set[str] = set()
    for group in collocations:
        unknown = [role for role in group if role not in roles]
        if unknown:
            raise JobError(
                f"collocation of {', '.join(group)}: the job has no role {unknown[0]}; it has {', '.join(roles)}"
            )
        twice = [role for role in group if role in seen]
        if twice:
            raise JobError(f"role {twice[0]} is in two collocations; name it in one")
        seen |= set(group)
        counts = {role: roles[role].total for role in group}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{role} has {count}" for role, count in counts.items())
            raise JobError(f"collocated roles pair up worker by worker, but {listed}; give them equal numbers")


def _hosts(
    roles: Mapping[str, RoleSpec], bundle_of: Mapping[tuple[str, int], int], share: Mapping[str, float]
) -> list[HostPlan]:
    hosts: list[HostPlan] = []
    for name, spec in roles.items():
        members = [r for r, s in roles.items() if spec.process is not None and s.process == spec.process] or [name]
        if name != members[0]:
            continue
        for rank in range(spec.total):
            bundles = {bundle_of.get((role, rank), -1) for role in members}
            if len(bundles) > 1 or any(roles[role].total != spec.total for role in members):
                raise JobError(
                    f"roles {', '.join(members)} are to share the process {spec.process!r}, so they need equal numbers "
                    "of workers and one collocation; add with_collocation(...)"
                )
            hosts.append(
                HostPlan(
                    workers=[(role, rank) for role in members],
                    bundle=bundles.pop(),
                    threads=_threads([roles[role].resource for role in members]),
                    accelerator=round(sum(share[role] for role in members), 4),
                    **_total([roles[role] for role in members]),
                    env={key: value for role in members for key, value in roles[role].env.items()},
                )
            )
    return hosts


def _threads(resources: Sequence[Resource]) -> int:
    return max(resource.threads for resource in resources) or max(1, int(sum(r.cpu for r in resources)))


def _check_capacity(asked: Mapping[str, Sequence[float]], nodes: int, devices: int) -> None:
    for owner, bundles in asked.items():
        if max(bundles) > devices:
            raise JobError(
                f"{owner} asks for {max(bundles):g} devices on one node, and a node has {devices}; lower that"
            )
    # Shares such as 1/3 were rounded down, so three of them may sum to a little less than one device.
    totals = {owner: sum(bundles) for owner, bundles in asked.items()}
    needed = math.ceil(sum(totals.values()) - 1e-3)
    if needed > nodes * devices:
        listed = ", ".join(f"{owner} {total:.4g}" for owner, total in totals.items() if total)
        raise JobError(
            f"the roles ask for {needed} devices ({listed}), but {nodes} node(s) of {devices} have {nodes * devices}; "
            "lower the counts, collocate roles, or set node_num and device_per_node"
        )
