"""The host memory that glibc keeps for a process when tensors are freed."""

from __future__ import annotations

import ctypes
import platform

import torch
from torch import nn

# Options of mallopt, by their numbers in malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_SMALL = 2**25
"""Parameters of a model, at most, of which memory that is freed is kept."""


def keep_freed_memory(model: nn.Module) -> None:
    """Let this process use again what its tensors leave free, up to a gigabyte, where a small model computes on a CPU,
    and give back to the system every megabyte that a large one does.

    glibc gives every block of 32 MB or more back to the system and asks for it anew, empty: the activations of a
    training step then cost a page fault for each 4 KB. Measured: 12% of the CPU time of a step of 11,000 tokens, with
    0.4 million parameters. The wider a model, the less: the bytes of a token grow with the width, its computation with
    the square of that. But the gradients of a large model, which stay, would lie in what is left free of the large
    blocks that they are reduced from, and the next layer's block would not fit there. (A gigabyte written into new
    blocks of 8 MiB took 0.97 CPU seconds, and 0.19 into kept ones.)
    """
    if torch.cuda.is_available() or platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    kept = 2**30 if sum(parameter.numel() for parameter in model.parameters()) <= _SMALL else 2**20
    # Older versions refuse more than 32 MB. Only then the other: alone it would freeze this one where it is.
    if library.mallopt(_MMAP_THRESHOLD, kept) or library.mallopt(_MMAP_THRESHOLD, 2**25):
        library.mallopt(_TRIM_THRESHOLD, kept)
