"""From roles to bundles and processes: who shares a device, who shares a process, and whether it fits."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from core.errors import JobError
from core.plan import BundlePlan, HostPlan, Placement, Resource, RoleSpec


def detect_devices() -> int:
    """How many NVIDIA GPUs this machine shows, without importing anything heavy."""
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
            bundles.append(_bundle([roles[role] for role in group], share, per_bundle, machine))
    hosts = _hosts(roles, bundle_of, share)
    if device_type == "GPU":
        _check_capacity(bundles, nodes, devices)
    return Placement(
        processes={name: spec.total for name, spec in roles.items()},
        devices={name: round(share[name] * spec.total, 4) for name, spec in roles.items()},
        bundles=bundles,
        hosts=hosts,
    )


def _bundle(
    specs: Sequence[RoleSpec], share: Mapping[str, float], workers: int, machine: tuple[str, int] | None
) -> BundlePlan:
    return BundlePlan(
        cpu=sum(spec.resource.cpu for spec in specs) * workers,
        accelerator=round(sum(share[spec.name] for spec in specs) * workers, 4),
        memory=sum(spec.resource.memory for spec in specs) * workers,
        custom={kind: amount * workers for kind, amount in _custom(specs).items()},
        machine=machine,
    )


def _custom(specs: Sequence[RoleSpec]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for spec in specs:
        total.update(spec.resource.custom)
    return dict(total)


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
                    cpu=sum(roles[role].resource.cpu for role in members),
                    threads=_threads([roles[role].resource for role in members]),
                    accelerator=round(sum(share[role] for role in members), 4),
                    memory=sum(roles[role].resource.memory for role in members),
                    custom=_custom([roles[role] for role in members]),
                    env={key: value for role in members for key, value in roles[role].env.items()},
                )
            )
    return hosts


def _threads(resources: Sequence[Resource]) -> int:
    return max(resource.threads for resource in resources) or max(1, int(sum(r.cpu for r in resources)))


def _check_capacity(bundles: Sequence[BundlePlan], nodes: int, devices: int) -> None:
    widest = max(bundle.accelerator for bundle in bundles)
    if widest > devices:
        raise JobError(f"one node has {devices} devices, but a role wants {widest:g} on one node; lower nproc_per_node")
    # Shares such as 1/3 were rounded down, so three of them may sum to a little less than one device.
    needed = math.ceil(sum(bundle.accelerator for bundle in bundles) - 1e-3)
    if needed > nodes * devices:
        raise JobError(
            f"the roles need {needed} devices, but {nodes} node(s) of {devices} have {nodes * devices}; "
            "lower the counts, collocate roles, or set node_num and device_per_node"
        )
