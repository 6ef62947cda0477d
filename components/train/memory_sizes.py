"""Sizes of buffers in device memory that engines set and that a memory estimate counts."""

from __future__ import annotations

CONTEXT_BYTES = 600_000_000
"""GPU memory of a process with torch before its first tensor, in bytes."""
ZERO_NUMBERS = {"cuda": 2**25, "cpu": 2**23}
"""By device type: number of gradients that DeepSpeed reduces at a time, and of optimizer states that a step has in
memory at a time. With zero_stage 3 it also gathers this many parameters at a time, or two layers if these are more."""
