"""Memory of the machines and GPUs that a run is planned for."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from training.launch.machines import assumed, is_here
from training.tracking.environment import output_of


@dataclass(frozen=True)
class Capacity:
    """Available memory in bytes. None stands for a number that is not known."""

    machine: int | None = None
    device: int | None = None
    is_guess: bool = False
    """True if the run uses other machines too, which are assumed to be like this one."""

    @classmethod
    def here(cls, gpus: object, nodes: int = 1) -> Capacity:
        """Return the memory of this machine, or of its control group, and of each of its GPUs.

        Other machines of a cluster are assumed to be like this one. Of machines that `assume_devices` names only the
        given numbers are known.
        """
        if machines := assumed():
            return cls(machines.host_bytes, machines.device_bytes if gpus else None)
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
            text = Path(path).read_text(encoding="utf-8").strip() if Path(path).is_file() else ""
            limits += [int(text)] if text.isdecimal() else []
        visible, order = os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ.get("CUDA_DEVICE_ORDER")
        # CUDA and nvidia-smi number GPUs alike only if both count by the bus.
        named = visible and (order == "PCI_BUS_ID" or not visible[0].isdecimal())
        device = gpu_bytes(visible if named else "") if gpus else None
        return cls(min(limits), device, is_guess=nodes > 1 or not is_here())


@functools.cache
def gpu_bytes(names: str) -> int | None:
    """Return the memory of each of the named GPUs, or None if it is not known or differs.

    Args:
        names: names as in CUDA_VISIBLE_DEVICES; empty for all GPUs.
    """
    chosen = [f"--id={names}"] if names else []
    shown = output_of("nvidia-smi", *chosen, "--query-gpu=memory.total", "--format=csv,noheader,nounits") or ""
    sizes = {int(line) * 2**20 for line in shown.split() if line.isdecimal()}
    return sizes.pop() if len(sizes) == 1 else None
