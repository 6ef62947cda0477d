"""Memory that a process keeps when tensors are freed: what test_freed_memory.py lets a process of its own measure."""

import resource
from pathlib import Path

import torch

from components.models.freed_memory import keep_freed_memory


def kept_when_freed() -> list[int]:
    """Bytes that stay with this process when two blocks of 64 MiB are freed: with a large model, and with a small
    one.
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
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
