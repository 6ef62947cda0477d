"""The machines that a run is planned for: this machine, or those of the option `assume_devices`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from components.installed import is_elsewhere
from core.placement import assumed_devices

_WRITTEN = re.compile(r"(\d+)(?:x(\d+))?(?:x(\d+)GB)?(?:x(\d+)GB)?", re.IGNORECASE)


@dataclass(frozen=True)
class Machines:
    """Identical machines of a cluster."""

    devices: int
    """Number of GPUs of each machine. 0 for machines without GPUs."""
    nodes: int | None = None
    """Number of machines. None for as many as the run asks for."""
    device_bytes: int | None = None
    """Memory of a GPU in bytes, or None if it is not known."""
    host_bytes: int | None = None
    """Memory of a machine in bytes, or None if it is not known."""

    @classmethod
    def parse(cls, text: str) -> Machines:
        """Parse `8`, `8x2`, `8x2x80GB` or `8x2x80GBx1000GB`: GPUs of each machine, number of machines, memory of a GPU,
        memory of a machine. For machines without GPUs the memory is that of a machine: `0x2x64GB`.

        Raises:
            ValueError: the text has another form.
        """
        match = _WRITTEN.fullmatch(text.strip())
        if match is None or match[2] == "0":
            raise ValueError(
                f"assume_devices={text}; write GPUs of each machine x machines, as 8x2, or with the memory of a GPU, "
                "as 8x2x80GB, and that of a machine, as 8x2x80GBx1000GB"
            )
        devices, nodes, *amounts = match.groups()
        device_bytes, host_bytes = (int(gigabytes) * 10**9 if gigabytes else None for gigabytes in amounts)
        if int(devices) == 0 and host_bytes is None:
            # Without GPUs the only memory that the text can give is that of the machine.
            device_bytes, host_bytes = None, device_bytes
        return cls(int(devices), int(nodes) if nodes else None, device_bytes, host_bytes)

    def __str__(self) -> str:
        machines = "as many machines as it asks for," if self.nodes is None else counted(self.nodes, "machine")
        memory = f" of {self.device_bytes / 1e9:g} GB" if self.device_bytes else ""
        gpus = f"{counted(self.devices, 'GPU')}{memory}" if self.devices else "no GPU"
        host = f" and {self.host_bytes / 1e9:g} GB" if self.host_bytes else ""
        return f"{machines} with {gpus}{host}" + ("" if self.nodes == 1 else " each")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or the plural: `1 node`, `2 nodes`."""
    return f"{number} {noun}" if number <= 1 else f"{number} {noun}s"


_assumed: ContextVar[Machines | None] = ContextVar("assumed_machines", default=None)


@contextmanager
def assuming(machines: Machines | None) -> Iterator[None]:
    """Plan for these machines inside the block. None plans for this machine."""
    machines_token = _assumed.set(machines)
    devices_token = assumed_devices.set(machines and machines.devices)
    packages_token = is_elsewhere.set(machines is not None)
    try:
        yield
    finally:
        _assumed.reset(machines_token)
        assumed_devices.reset(devices_token)
        is_elsewhere.reset(packages_token)


def assumed() -> Machines | None:
    """Return the assumed machines, or None if the run is planned for this machine."""
    return _assumed.get()


def is_here() -> bool:
    """True if the run is planned for this machine, so that its cores, memory and packages count."""
    # With RAY_ADDRESS the processes start on the machines of a cluster, of which this one may be no part.
    return assumed() is None and not os.environ.get("RAY_ADDRESS")


def cores_here() -> int | None:
    """Return the number of CPU cores that the run may use, or None if it runs on other machines."""
    return len(os.sched_getaffinity(0)) if is_here() else None
