"""The machines that a run is planned for, this one or those that --assume_devices names, and what is on which."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from components.generate.choice import is_elsewhere
from core import Job
from core.placement import assumed_devices

_WRITTEN = re.compile(r"(\d+)(?:x(\d+))?(?:x(\d+)GB)?(?:x(\d+)GB)?", re.IGNORECASE)


@dataclass(frozen=True)
class Machines:
    """Machines of a cluster, all alike."""

    devices: int
    """GPUs of each; 0: they compute on their CPUs."""
    nodes: int | None = None
    """How many there are; None: as many as the run asks for."""
    device_bytes: int | None = None
    """Memory of a GPU; None: not known."""
    host_bytes: int | None = None
    """Memory of a machine; None: not known."""

    @classmethod
    def parse(cls, text: str) -> Machines:
        """Of `8`, `8x2`, `8x2x80GB` or `8x2x80GBx1000GB`: GPUs of each machine, machines, memory of a GPU, and of a
        machine. Machines without GPUs have no GPU's: `0x2x64GB`.

        Raises:
            ValueError: it is written otherwise.
        """
        found = _WRITTEN.fullmatch(text.strip())
        if found is None or found[2] == "0":
            raise ValueError(
                f"assume_devices={text}; write GPUs of each machine x machines, as 8x2, or with the memory of a GPU, "
                "as 8x2x80GB, and that of a machine, as 8x2x80GBx1000GB"
            )
        devices, nodes, *amounts = found.groups()
        device_bytes, host_bytes = (int(gigabytes) * 10**9 if gigabytes else None for gigabytes in amounts)
        if int(devices) == 0 and host_bytes is None:
            device_bytes, host_bytes = None, device_bytes
        return cls(int(devices), int(nodes) if nodes else None, device_bytes, host_bytes)

    def __str__(self) -> str:
        if self.nodes is None:
            machines = "as many machines as it asks for,"
        else:
            machines = f"{self.nodes} machine{'s' * (self.nodes > 1)}"
        each = f" of {self.device_bytes / 1e9:g} GB" if self.device_bytes else ""
        gpus = f"{self.devices} GPU{'s' * (self.devices > 1)}{each}" if self.devices else "no GPU"
        host = f" and {self.host_bytes / 1e9:g} GB" if self.host_bytes else ""
        return f"{machines} with {gpus}{host}{' each' * (self.nodes != 1)}"


_assumed: ContextVar[Machines | None] = ContextVar("assumed_machines", default=None)


@contextmanager
def assuming(machines: Machines | None) -> Iterator[None]:
    """Let everything that asks for the machine find these machines instead; None: what is here."""
    machines_token = _assumed.set(machines)
    devices_token = assumed_devices.set(machines.devices if machines else None)
    packages_token = is_elsewhere.set(machines is not None)
    try:
        yield
    finally:
        _assumed.reset(machines_token)
        assumed_devices.reset(devices_token)
        is_elsewhere.reset(packages_token)


def assumed() -> Machines | None:
    """The machines that are assumed; None: this one counts."""
    return _assumed.get()


def is_here() -> bool:
    """Whether the run is planned for the machine at hand, so that this one's cores, memory and packages count."""
    return assumed() is None and not os.environ.get("RAY_ADDRESS")


def cores_here() -> int | None:
    """CPU cores that processes of the run may use; None: not known, as the run is on other machines."""
    return len(os.sched_getaffinity(0)) if is_here() else None


# --- which node each worker is on


def nodes_of(job: Job) -> list[int]:
    """The node of each of the job's bundles, from 0: one way to lay them out, which need not be the one that Ray takes.
    First come the bundles of roles that are spread over nodes, and the large ones before the small ones.

    Raises:
        ValueError: a role fits on no node.
    """
    bundles, devices = job.placement.bundles, job.device_per_node if job.device_type == "GPU" else 0
    together: dict[object, list[int]] = {}
    for index, bundle in enumerate(bundles):
        together.setdefault(bundle.machine or index, []).append(index)
    # Shares such as 1/3 were rounded down, so three of them may sum to a little less than one device.
    sizes = {key: math.ceil(sum(bundles[i].accelerator for i in own) - 1e-3) for key, own in together.items()}
    found = [0] * len(bundles)
    machines = assumed()
    used = [0] * ((machines and machines.nodes) or job.node_num)
    taken: set[tuple[str, int]] = set()
    for key in sorted(together, key=lambda key: (isinstance(key, int), -sizes[key])):
        first, size = together[key][0], sizes[key]
        machine = bundles[first].machine
        role = machine[0] if machine else ""
        free = [node for node, full in enumerate(used) if full + size <= devices and (role, node) not in taken]
        if not free:
            raise ValueError(_no_room(job, first, size, used, devices))
        used[free[0]] += size
        if role:
            taken.add((role, free[0]))
        for index in together[key]:
            found[index] = free[0]
    return found


def _no_room(job: Job, bundle: int, size: int, used: Sequence[int], devices: int) -> str:
    """Who finds no node, what it asks for, and what there is."""
    owners = dict.fromkeys(role for host in job.placement.hosts if host.bundle == bundle for role, _ in host.workers)
    widest = max(owners, key=lambda role: job.roles[role].nnodes)
    nodes = f"{len(used)} node{'s' * (len(used) > 1)}"
    asked = job.roles[widest].nnodes
    if asked > len(used):
        return f"{widest} asks for {asked} nodes, and there {'are' if len(used) > 1 else 'is'} {nodes}; lower its nodes"
    left = ", ".join(str(devices - full) for full in used)
    return (
        f"{' + '.join(owners)} asks for {size} device{'s' * (size > 1)} on one node, and of {devices} on each of "
        f"{nodes} only {left} are left by the other roles; lower the counts, colocate roles, or set more nodes"
    )


def node_lines(job: Job, nodes: Sequence[int]) -> list[str]:
    """What is on which node, as `nodes_of` has laid it out: one line for each."""
    found = list[str]()
    for node in range(job.node_num):
        ranks: dict[str, list[int]] = {}
        for host in job.placement.hosts:
            if nodes[host.bundle] == node:
                for role, rank in host.workers:
                    ranks.setdefault(role, []).append(rank)
        workers = ", ".join(f"{role.lower()} {ranges(of_role)}" for role, of_role in ranks.items())
        used = sum(bundle.accelerator for bundle, on in zip(job.placement.bundles, nodes, strict=True) if on == node)
        gpus = f"; {math.ceil(used - 1e-3)} of {job.device_per_node} GPUs" if job.device_type == "GPU" else ""
        found.append(f"node {node + 1}: {workers or 'nothing'}{gpus}")
    return found


def ranges(numbers: Sequence[int]) -> str:
    """`0-3,6` of 0, 1, 2, 3 and 6."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
