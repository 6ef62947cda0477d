"""Sizes of buffers in device memory that engines set and that the memory estimate includes."""

from __future__ import annotations

CONTEXT_BYTES = 600_000_000
"""GPU memory of a process with torch before its first tensor (CUDA context), in bytes."""
ZERO_NUMBERS = {"cuda": 2**25, "cpu": 2**23}
"""Number of elements of DeepSpeed's buffers by device type: of gradients that are reduced at a time, and of optimizer
states that a step holds at a time. With zero_stage 3 it also gathers this many parameters at a time, or two layers if
these have more."""
