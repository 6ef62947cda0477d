"""Machines that a dry run plans for instead of this one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from components.installed import is_elsewhere
from core.placement import assumed_devices
from training.launch.machines import assumed_machines, counted

_WRITTEN = re.compile(r"(\d+)(?:x(\d+))?(?:x(\d+)GB)?(?:x(\d+)GB)?", re.IGNORECASE)


@dataclass(frozen=True)
class Machines:
    """Identical machines of a cluster."""

    devices: int
    """Number of GPUs of each machine. 0 for machines without GPUs."""
    nodes: int | None = None
    """Number of machines. None: as many as the run requests."""
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


@contextmanager
def assuming(machines: Machines) -> Iterator[None]:
    """Plan for these machines inside the block."""
    machines_token = assumed_machines.set(machines)
    devices_token = assumed_devices.set(machines.devices)
    packages_token = is_elsewhere.set(True)
    try:
        yield
    finally:
        assumed_machines.reset(machines_token)
        assumed_devices.reset(devices_token)
        is_elsewhere.reset(packages_token)


def check(text: str) -> None:
    """Check the value of `assume_devices`.

    Raises:
        ValueError: see `Machines.parse`.
    """
    Machines.parse(text)


def assuming_text(text: str) -> AbstractContextManager[None]:
    """Return `assuming` for the value of `assume_devices`. A value that `check` refuses has no effect."""
    try:
        return assuming(Machines.parse(text))
    except ValueError:
        # The options are checked later, where all errors are reported together.
        return nullcontext()
