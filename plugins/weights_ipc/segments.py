"""Allocation of memory that can be shared by CUDA IPC although torch uses expandable segments.

Memory of an expandable segment is shared through file descriptors of the sender (`pidfd_getfd`), which containers
without the right to trace processes refuse. A bucket is therefore allocated in a segment of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

import torch

_SETTING = re.compile(r"(?<=expandable_segments:)\s*true", re.IGNORECASE)


def allocator_settings() -> str:
    """Return torch's settings of the GPU allocator, from the environment."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def are_expandable() -> bool:
    """True if the environment enables expandable segments."""
    return _SETTING.search(allocator_settings()) is not None


@contextlib.contextmanager
def fixed_segment() -> Iterator[Any]:
    """Allocate GPU memory in a new segment that is not expandable, inside the block.

    Yields:
        The pool of the memory, to be kept as long as the memory is used; None if segments are not expandable.
    """
    if not are_expandable():
        yield None
        return
    settings = allocator_settings()
    private: Any = torch._C
    # All settings, because torch resets those that are left out.
    private._accelerator_setAllocatorSettings(_SETTING.sub("False", settings))
    try:
        # A pool of its own, because torch would reuse free memory of an expandable segment.
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            yield pool
    finally:
        private._accelerator_setAllocatorSettings(settings)
