"""Placement of roles in bundles and processes: shared devices, shared processes, and the check of the capacity."""

import contextlib
import functools
import math
import os
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import JobError
from core.plan import BundlePlan, Placement, ProcessPlan, Resource, RoleSpec

_LIST_S = 30.0

assumed_devices: ContextVar[int | None] = ContextVar("assumed_devices", default=None)
"""Number of GPUs per machine if the job is planned for other machines than this one, or None."""


def detect_devices() -> int:
    """Return the number of visible NVIDIA GPUs of this machine, or the assumed number, without importing torch."""
    assumed = assumed_devices.get()
    if assumed is not None:
        return assumed
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return _gpus_of_this_machine()


@functools.cache
def _gpus_of_this_machine() -> int:
    # Three sources: some containers lack the first (/proc), some the last (/dev), and WSL lacks both.
    count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    program = shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:/usr/lib/wsl/lib")
    if not count and program is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_LIST_S, check=False)
            count = len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE))
    return count or len(list(Path("/dev").glob("nvidia[0-9]*")))


def plan(
    roles: Mapping[str, RoleSpec], collocations: Sequence[Sequence[str]], device_type: str, nodes: int, devices: int
) -> Placement:
    """Plan the bundles and processes of all roles.

    Each worker gets its own bundle. The ranks of a `train` role on one node share a bundle, so that they stay on one
    node. Collocated roles share bundles rank by rank, and the accelerator in equal parts. A worker with n devices
    shares a bundle with n ranks of one device each. Roles with the same process name share a process. A role with
    several nodes has the same number of ranks on each node; the nodes are chosen when the job starts.

    Args:
        roles: the roles of the job, by name.
        collocations: groups of role names that share devices.
        device_type: "CPU" or "GPU".
        nodes: number of nodes.
        devices: number of devices per node.

    Raises:
        JobError: a collocation or a process is not possible, or the roles need more devices than the nodes have.
    """
    _check_collocations(roles, collocations)
    on_gpu = device_type == "GPU"
    bundles: list[BundlePlan] = []
    seats: dict[tuple[str, int], _Seat] = {}
    share: defaultdict[str, float] = defaultdict(float)
    requested: defaultdict[str, list[float]] = defaultdict(list)
    for name in roles:
        group = [roles[role] for role in next((group for group in collocations if name in group), [name])]
        if name != group[0].name:
            continue
        first, *others = group
        width = {spec.name: _width(spec) for spec in group}
        size = max(width.values())
        if not others:
            width = {first.name: 1}
            size = {"train": first.nproc_per_node}.get(first.kind, 1)
        # Ray cannot reserve shares of several devices. So the role with the most devices per worker reserves them
        # whole, and the other roles get CUDA_VISIBLE_DEVICES without a reservation.
        claims = max(width, key=lambda role: width[role]) if others and size > 1 and on_gpu else None
        for spec in group:
            if on_gpu and others:
                share[spec.name] = math.floor(1e4 * width[spec.name] / len(group)) / 1e4
            elif on_gpu:
                share[spec.name] = spec.resource.accelerator
        for start in range(0, first.total * width[name], size):
            workers = [(s, r) for s in group for r in range(start // width[s.name], (start + size) // width[s.name])]
            for spec, rank in workers:
                seats[spec.name, rank] = _Seat(len(bundles), share[spec.name])
                if spec.name == claims:
                    seats[spec.name, rank].claims = size
                elif claims is not None:
                    at = rank * width[spec.name] - start
                    seats[spec.name, rank] = _Seat(len(bundles), 0.0, list(range(at, at + width[spec.name])))
            bundles.append(_bundle(workers, sum(seats[spec.name, rank].claims for spec, rank in workers)))
            requested[" + ".join(width)].append(bundles[-1].accelerator)
    hosts = _hosts(roles, seats)
    if on_gpu:
        _check_capacity(requested, nodes, devices)
    return Placement(
        processes={name: spec.total for name, spec in roles.items()},
        devices={name: round(share[name] * spec.total, 4) for name, spec in roles.items()},
        bundles=bundles,
        hosts=hosts,
    )


@dataclass
class _Seat:
    """Bundle and devices of a worker."""

    bundle: int
    claims: float
    """Number of devices that Ray reserves for the worker."""
    shown: list[int] = field(default_factory=list)
    """Indices of the bundle's devices that the worker uses, if another worker has reserved them."""


def _width(spec: RoleSpec) -> int:
    """Return the number of one-device ranks that share the devices of one worker."""
    return max(1, int(spec.resource.accelerator))


def _bundle(workers: Sequence[tuple[RoleSpec, int]], devices: float) -> BundlePlan:
    """Return the bundle with the resources of all workers, on the machine of the role that spans several."""
    spread, rank = max(workers, key=lambda worker: worker[0].nnodes)
    machine = (spread.name, rank // spread.nproc_per_node) if spread.nnodes > 1 else None
    return BundlePlan(accelerator=round(devices, 4), machine=machine, **_total([spec for spec, _ in workers]))


def _total(specs: Sequence[RoleSpec]) -> dict[str, Any]:
    """Return the sum of the resources of one worker per role."""
    resources = [spec.resource for spec in specs]
    custom = sum((Counter(r.custom) for r in resources), Counter[str]())
    return {"cpu": sum(r.cpu for r in resources), "memory": sum(r.memory for r in resources), "custom": custom}


def _check_collocations(roles: Mapping[str, RoleSpec], collocations: Sequence[Sequence[str]]) -> None:
    seen: set[str] = set()
    for group in collocations:
        unknown = [role for role in group if role not in roles]
        if unknown:
            raise JobError(
                f"collocation of {', '.join(group)}: the job has no role {unknown[0]}; it has {', '.join(roles)}"
            )
        repeated = [role for role in group if role in seen]
        if repeated:
            raise JobError(f"role {repeated[0]} is in two collocations; name it in one")
        seen |= set(group)
        specs = [roles[role] for role in group]
        size = max(map(_width, specs))
        uneven = [s for s in specs if size % _width(s) or (s.nnodes > 1 and s.nproc_per_node * _width(s) % size)]
        if uneven or len({spec.total * _width(spec) for spec in specs}) > 1:
            listed = ", ".join(f"{s.name} has {s.nnodes} x {s.nproc_per_node} x {_width(s)}" for s in specs)
            raise JobError(
                f"collocated roles need equal numbers of devices on each node, but {listed} (nodes x workers x "
                "devices); set equal numbers"
            )


def _hosts(roles: Mapping[str, RoleSpec], seats: Mapping[tuple[str, int], _Seat]) -> list[ProcessPlan]:
    hosts: list[ProcessPlan] = []
    for name, spec in roles.items():
        members = [r for r, s in roles.items() if spec.process is not None and s.process == spec.process] or [name]
        if name != members[0]:
            continue
        for rank in range(spec.total):
            chosen = [seats.get((role, rank), _Seat(-1, 0.0)) for role in members]
            if len({seat.bundle for seat in chosen}) > 1 or any(roles[role].total != spec.total for role in members):
                raise JobError(
                    f"roles {', '.join(members)} share the process {spec.process!r}, so they need equal numbers of "
                    "workers and one collocation; add with_collocation(...)"
                )
            hosts.append(
                ProcessPlan(
                    workers=[(role, rank) for role in members],
                    bundle=chosen[0].bundle,
                    threads=_threads([roles[role].resource for role in members]),
                    accelerator=round(sum(seat.claims for seat in chosen), 4),
                    shown=chosen[0].shown,
                    **_total([roles[role] for role in members]),
                    env={key: value for role in members for key, value in roles[role].env.items()},
                )
            )
    return hosts


def _threads(resources: Sequence[Resource]) -> int:
    explicit = [resource.threads for resource in resources if resource.threads]
    return max(explicit, default=max(1, int(sum(resource.cpu for resource in resources))))


def _check_capacity(requested: Mapping[str, Sequence[float]], nodes: int, devices: int) -> None:
    for owner, bundles in requested.items():
        if max(bundles) > devices:
            raise JobError(f"{owner} needs {max(bundles):g} devices on one node, but a node has {devices}; lower it")
    totals = {owner: sum(bundles) for owner, bundles in requested.items()}
    # Shares such as 1/3 were rounded down, so three of them may sum to slightly less than one device.
    needed = math.ceil(sum(totals.values()) - 1e-3)
    if needed > nodes * devices:
        listed = ", ".join(f"{owner} {total:.4g}" for owner, total in totals.items() if total)
        raise JobError(
            f"the roles need {needed} devices ({listed}), but {nodes} node(s) of {devices} have {nodes * devices}; "
            "lower the counts, collocate roles, or set node_num and device_per_node"
        )
