"""Time limit of the handshake."""

from __future__ import annotations

from typing import Any

from core.placement import detect_devices

DEFAULT_S = 20.0
"""Time limit of each channel in seconds."""
SMALL_BYTES = 1024
LARGE_BYTES = 64 * 2**20
"""Sizes of the messages that are sent. The large one is sent between machines and GPUs only."""


def limit_of(config: Any, *, is_large: bool = False) -> float:
    """Return the time limit of each channel in seconds, or 0 if the handshake is not used.

    Args:
        config: options of the run.
        is_large: True if processes on several machines or GPUs are known to take part.
    """
    placement = getattr(config, "placement", None)
    limit = getattr(placement, "handshake_timeout", None)
    if limit is not None:
        return float(limit)
    if is_large or getattr(placement, "nodes", 1) > 1 or detect_devices() > 1:
        return DEFAULT_S
    return 0.0
