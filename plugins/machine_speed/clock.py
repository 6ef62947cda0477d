"""Seconds of the fastest of some calls."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def fastest_seconds(act: Callable[[], object], budget_s: float = 0.25, of_thread: bool = False) -> float:
    """Return the seconds of the fastest of some calls, after one call that is not measured.

    Other programs only make calls slower, so the fastest is the steadiest number, and a peak.

    Args:
        act: function to measure. On a GPU it must wait for its kernels.
        budget_s: time after which no further call begins. There are at least three calls.
        of_thread: measure the time of this thread, which leaves out the time in which other programs had the core.
    """
    clock = time.thread_time if of_thread else time.perf_counter
    act()  # allocates, and starts threads
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - began < budget_s:
        start = clock()
        act()
        seconds.append(clock() - start)
    return min(seconds)


def is_alone(device: str) -> bool:
    """Return True if a single thread of the processor computes."""
    return device == "cpu" and torch.get_num_threads() == 1
