"""Share of GPU memory that an engine may reserve at start-up."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import time
from collections.abc import Callable

from components.train.memory_sizes import CONTEXT_BYTES

MEMORY_WITHIN_S = 60.0
"""Time in seconds for which a starting engine waits for other processes to free memory of its GPUs."""
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,uuid,memory.free,memory.total", "--format=csv,noheader,nounits")

_log = logging.getLogger(__name__)


def free_share(
    requested: float, read: Callable[[], list[tuple[int, int]]], within_s: float = MEMORY_WITHIN_S, every_s: float = 1.0
) -> float:
    """Return the share of its GPUs' memory that an engine may reserve at start-up.

    vLLM does not start if less memory is free than its share. This happens when an engine replaces a lost one while
    other roles use the GPU.

    Args:
        requested: requested share of the memory.
        read: function that returns the current (free, total) bytes of each GPU; an empty list if they are unknown.
        within_s: maximum time to wait for other processes to free memory, in seconds.
        every_s: time between two calls of `read`, in seconds.

    Returns:
        `requested`; or the share that is free after `within_s`, with a warning.
    """
    began, has_warned = time.monotonic(), False
    while True:
        free = min(((free - CONTEXT_BYTES) / total for free, total in read()), default=requested)
        if free >= requested or time.monotonic() - began >= within_s:
            break
        if not has_warned:
            text = "the engine is to take %.2f of a GPU's memory, and %.2f are free; waiting up to %g s for others"
            _log.warning(text, requested, free, within_s)
            has_warned = True
        time.sleep(every_s)
    # Rounded down, because the engine would not start with a share that is a little larger than what is free.
    share = math.floor(free * 100) / 100
    # With a share of 0, vLLM's own error names the missing memory, so it gets the requested share.
    if free >= requested or share <= 0:
        return requested
    text = "the engine takes %.2f of a GPU's memory in place of %.2f, as no more is free: its cache is smaller by that"
    _log.warning(text, share, requested)
    return share


def gpu_memory(count: int) -> list[tuple[int, int]]:
    """Return (free, total) bytes of the first `count` visible GPUs; an empty list if nvidia-smi fails.

    CUDA is not used for it, because any query would create a context that takes 0.5 GB of the GPU.
    """
    try:
        shown = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return memory_of(shown, os.environ.get("CUDA_VISIBLE_DEVICES"))[:count]


def memory_of(shown: str, visible: str | None) -> list[tuple[int, int]]:
    """Parse the output of nvidia-smi.

    Args:
        shown: the output, with index, UUID, free and total MiB of each GPU.
        visible: value of CUDA_VISIBLE_DEVICES, with indices or beginnings of UUIDs. None: all GPUs are visible.

    Returns:
        (free, total) bytes of each visible GPU. GPUs without numbers are left out.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in shown.splitlines()]
    known = [row for row in rows if len(row) == 4 and row[2].isdecimal() and row[3].isdecimal()]
    names = [row[0] for row in known] if visible is None else [name.strip() for name in visible.split(",")]
    chosen = [
        row for name in names for row in known if name == row[0] or (name[:4] == "GPU-" and row[1].startswith(name))
    ]
    return [(int(free) * 2**20, int(total) * 2**20) for _, _, free, total in chosen]
