"""Share of the memory of its GPUs that an engine may take as it starts."""

from __future__ import annotations

import logging
import math
import subprocess
import time
from collections.abc import Callable

import torch

from components.train.memory_sizes import CONTEXT_BYTES

MEMORY_WITHIN_S = 60.0
"""Maximum time that a starting engine waits for other processes to free the memory of its GPUs."""
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=uuid,memory.free,memory.total", "--format=csv,noheader,nounits")

_log = logging.getLogger(__name__)


def free_share(
    asked: float,
    read: Callable[[], list[tuple[int, int]]],
    within_s: float = MEMORY_WITHIN_S,
    every_s: float = 1.0,
) -> float:
    """The share of its GPUs that an engine may take as it starts. vLLM refuses to where less is free than its share, as
    when it takes a lost engine's place while other roles use the GPU.

    Args:
        asked: the share that it is to take.
        read: (free, total) bytes of each of its GPUs now; none where that is not known.
        within_s: to wait for others to give memory back.
        every_s: time between two looks.

    Returns:
        `asked`; or, with a warning, what is free after all this time.
    """
    began, has_warned = time.monotonic(), False
    while True:
        free = min(((free - CONTEXT_BYTES) / total for free, total in read()), default=asked)
        if free >= asked or time.monotonic() - began >= within_s:
            break
        if not has_warned:
            text = "the engine is to take %.2f of a GPU's memory, and %.2f are free; waiting up to %g s for others"
            _log.warning(text, asked, free, within_s)
            has_warned = True
        time.sleep(every_s)
    share = math.floor(free * 100) / 100
    if free >= asked or share <= 0:  # without any vLLM says best what is missing
        return asked
    text = "the engine takes %.2f of a GPU's memory in place of %.2f, as no more is free: its cache is smaller by that"
    _log.warning(text, share, asked)
    return share


def gpu_memory(count: int) -> list[tuple[int, int]]:
    """(free, total) bytes of the first GPUs that this process sees; none where nvidia-smi does not tell. CUDA itself
    would take memory on each GPU that it is asked about.
    """
    try:
        shown = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = memory_by_uuid(shown)
    names = [str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-") for index in range(count)]
    return [found[name] for name in names if name in found]


def memory_by_uuid(shown: str) -> dict[str, tuple[int, int]]:
    """UUID -> (free, total) bytes of a GPU, of lines that nvidia-smi prints; what has no numbers is left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in shown.splitlines()]
    known = [row for row in rows if len(row) == 3 and row[1].isdecimal() and row[2].isdecimal()]
    return {name.removeprefix("GPU-"): (int(free) * 2**20, int(total) * 2**20) for name, free, total in known}
