"""From roles to bundles and processes: who shares a device, who shares a process, and whether it fits."""

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
"""GPUs of the machines that a job is planned for, where that is not this one."""


def detect_devices() -> int:
    """How many NVIDIA GPUs this machine shows, or the assumed one, without importing anything heavy."""
    assumed = assumed_devices.get()
    if assumed is not None:
        return assumed
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return _gpus_of_this_machine()


@functools.cache
def _gpus_of_this_machine() -> int:
    # Some containers lack the first, some the last, and WSL both.
    folder = Path("/proc/driver/nvidia/gpus")
    found = len(list(folder.iterdir())) if folder.is_dir() else 0
    program = shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:/usr/lib/wsl/lib")
    if not found and program is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_LIST_S, check=False)
            found = len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE))
    return found or len(list(Path("/dev").glob("nvidia[0-9]*")))


def plan(
    roles: Mapping[str, RoleSpec], collocations: Sequence[Sequence[str]], device_type: str, nodes: int, devices: int
) -> Placement:
    """Lay the roles out.

    Each worker gets a bundle of its own; the ranks of a node share one, so that they stay on one node. Collocated
    roles share bundles rank by rank, and the accelerator in equal parts; a worker of several devices is with as many
    ranks that have one each. Roles of one process share a host. A role of several nodes has as many ranks on each;
    which machines these are is found when the job starts.

    Raises:
        JobError: a collocation or a process cannot be formed, or there are fewer devices than are asked for.
    """
    _check_collocations(roles, collocations)
    on_gpu = device_type == "GPU"
    bundles: list[BundlePlan] = []
    seats: dict[tuple[str, int], _Seat] = {}
    share: dict[str, float] = {}
    asked: defaultdict[str, list[float]] = defaultdict(list)
    for name in roles:
        group = [roles[role] for role in next((group for group in collocations if name in group), [name])]
        if name != group[0].name:
            continue
        first, *others = group
        width = {spec.name: _width(spec) if others else 1 for spec in group}
        size = first.nproc_per_node if first.kind == "train" and not others else max(width.values())
        # Ray gives nobody shares of several devices: who has them whole claims them, and the others are shown theirs.
        claims = max(width, key=lambda role: width[role]) if others and size > 1 and on_gpu else None
        for spec in group:
            each = math.floor(1e4 * width[spec.name] / len(group)) / 1e4 if others else spec.resource.accelerator
            share[spec.name] = each if on_gpu else 0.0
        for start in range(0, first.total * width[name], size):
            workers = [
                (s, rank) for s in group for rank in range(start // width[s.name], (start + size) // width[s.name])
            ]
            for spec, rank in workers:
                seats[spec.name, rank] = _Seat(len(bundles), share[spec.name])
                if claims is not None:
                    at = rank * width[spec.name] - start
                    shown = [] if spec.name == claims else list(range(at, at + width[spec.name]))
                    seats[spec.name, rank] = _Seat(len(bundles), 0.0 if shown else size, shown)
            bundles.append(_bundle(workers, size if claims else sum(share[spec.name] for spec, _ in workers)))
            asked[" + ".join(width)].append(bundles[-1].accelerator)
    hosts = _hosts(roles, seats)
    if on_gpu:
        _check_capacity(asked, nodes, devices)
    return Placement(
        processes={name: spec.total for name, spec in roles.items()},
        devices={name: round(share[name] * spec.total, 4) for name, spec in roles.items()},
        bundles=bundles,
        hosts=hosts,
    )


@dataclass
class _Seat:
    """The place of a worker."""

    bundle: int
    claims: float
    """Devices that Ray gives it."""
    shown: list[int] = field(default_factory=list)
    """Those of the bundle that it is shown, where another worker claims them."""


def _width(spec: RoleSpec) -> int:
    """Devices that a worker shares with as many workers that have one each."""
    return max(1, int(spec.resource.accelerator))


def _bundle(workers: Sequence[tuple[RoleSpec, int]], devices: float) -> BundlePlan:
    """What they are given together, on the machine of the role that is spread over several."""
    spread, rank = max(workers, key=lambda worker: worker[0].nnodes)
    machine = (spread.name, rank // spread.nproc_per_node) if spread.nnodes > 1 else None
    return BundlePlan(accelerator=round(devices, 4), machine=machine, **_total([spec for spec, _ in workers]))


def _total(specs: Sequence[RoleSpec]) -> dict[str, Any]:
    """What a worker of each of these is given together."""
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
        twice = [role for role in group if role in seen]
        if twice:
            raise JobError(f"role {twice[0]} is in two collocations; name it in one")
        seen |= set(group)
        specs = [roles[role] for role in group]
        size = max(map(_width, specs))
        uneven = [s for s in specs if size % _width(s) or (s.nnodes > 1 and s.nproc_per_node * _width(s) % size)]
        if uneven or len({spec.total * _width(spec) for spec in specs}) > 1:
            listed = ", ".join(f"{s.name} has {s.nnodes} x {s.nproc_per_node} x {_width(s)}" for s in specs)
            raise JobError(
                f"collocated roles pair up on each node device by device, but of nodes x workers x devices {listed}; "
                "give them equal numbers"
            )


def _hosts(roles: Mapping[str, RoleSpec], seats: Mapping[tuple[str, int], _Seat]) -> list[ProcessPlan]:
    hosts: list[ProcessPlan] = []
    for name, spec in roles.items():
        members = [r for r, s in roles.items() if spec.process is not None and s.process == spec.process] or [name]
        if name != members[0]:
            continue
        for rank in range(spec.total):
            found = [seats.get((role, rank), _Seat(-1, 0.0)) for role in members]
            if len({seat.bundle for seat in found}) > 1 or any(roles[role].total != spec.total for role in members):
                raise JobError(
                    f"roles {', '.join(members)} are to share the process {spec.process!r}, so they need equal numbers "
                    "of workers and one collocation; add with_collocation(...)"
                )
            hosts.append(
                ProcessPlan(
                    workers=[(role, rank) for role in members],
                    bundle=found[0].bundle,
                    threads=_threads([roles[role].resource for role in members]),
                    accelerator=round(sum(seat.claims for seat in found), 4),
                    shown=found[0].shown,
                    **_total([roles[role] for role in members]),
                    env={key: value for role in members for key, value in roles[role].env.items()},
                )
            )
    return hosts


def _threads(resources: Sequence[Resource]) -> int:
    asked = [resource.threads for resource in resources if resource.threads]
    return max(asked) if asked else max(1, int(sum(resource.cpu for resource in resources)))


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
