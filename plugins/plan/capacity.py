"""Memory of the machines and GPUs that a run is planned for."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from components.process.program_output import output_of
from training.launch.machines import assumed, is_this_machine

_LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Memory limits of control groups, in versions 2 and 1."""


@dataclass(frozen=True)
class Capacity:
    """Available memory in bytes. None stands for a number that is not known."""

    machine: int | None = None
    device: int | None = None
    is_guess: bool = False
    """True if the run uses other machines too, which are assumed to be like this one."""

    @classmethod
    def of_machine(cls, gpus: object, nodes: int = 1) -> Capacity:
        """Return the memory of this machine, or of its control group, and of each of its GPUs.

        Other machines of a cluster are assumed to be like this one. For machines that `assume_devices` describes, only
        the numbers in that option are known.
        """
        if machines := assumed():
            return cls(machines.host_bytes, machines.device_bytes if gpus else None)
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        for path in filter(Path.is_file, map(Path, _LIMIT_FILES)):
            text = path.read_text(encoding="utf-8").strip()
            # A control group without a limit says "max".
            if text.isdecimal():
                limits.append(int(text))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        # CUDA and nvidia-smi number GPUs equally only if CUDA orders them by bus. Otherwise a number could name a GPU
        # of another size, so the memory of all GPUs is queried.
        if visible[:1].isdecimal() and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            visible = ""
        device = gpu_bytes(visible) if gpus else None
        return cls(min(limits), device, is_guess=nodes > 1 or not is_this_machine())


@functools.cache
def gpu_bytes(names: str) -> int | None:
    """Return the memory of each of the named GPUs in bytes, or None if it is not known or differs.

    Args:
        names: names as in CUDA_VISIBLE_DEVICES; empty for all GPUs.
    """
    selection = [f"--id={names}"] if names else []
    output = output_of("nvidia-smi", *selection, "--query-gpu=memory.total", "--format=csv,noheader,nounits") or ""
    # nvidia-smi prints MiB.
    sizes = {int(size) * 2**20 for size in output.split() if size.isdecimal()}
    return sizes.pop() if len(sizes) == 1 else None
