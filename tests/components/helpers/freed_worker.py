"""Memory that a process keeps when tensors are freed: measurements in a separate process for test_freed_memory.py."""

import resource
from pathlib import Path

import torch

from components.models.freed_memory import keep_freed_memory


def kept_when_freed() -> list[int]:
    """Return the bytes that stay with this process after two blocks of 64 MiB are freed, with a large and with a small
    model.
    """
    with torch.device("meta"):
        models = [torch.nn.Linear(2**13, 2**13), torch.nn.Linear(100, 100)]
    kept = []
    before = resident()
    for model in models:
        keep_freed_memory(model)
        blocks = [torch.ones(2**26, dtype=torch.uint8) for _ in range(2)]
        del blocks
        kept.append(resident() - before)
    return kept


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
