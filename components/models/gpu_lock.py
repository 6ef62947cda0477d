"""Lock of the GPUs of a process, for changes of memory that other processes on the same GPUs must not disturb."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Iterator

from components.process.heartbeat import beat

WITHIN_S = 900.0
"""Maximum time in seconds to wait for the lock. Starting an engine of a large model takes minutes."""
NO_GPU = {"", "-1"}
"""Entries of CUDA_VISIBLE_DEVICES that hide all GPUs."""
_LOOK_S = 0.05
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def gpu_memory_locked(within_s: float = WITHIN_S) -> Iterator[None]:
    """Hold the lock of each GPU in CUDA_VISIBLE_DEVICES inside the block.

    vLLM ends with an error if the free memory of its GPU grows while it starts, or shrinks while it goes to sleep. So
    engines hold the lock during both, and trainers hold it while they move their state to host memory or back.

    Without the variable, or if it names no GPU, nothing is locked. If another process holds a lock for more than
    `within_s` seconds, the block is run without it, with a warning.
    """
    with contextlib.ExitStack() as held:
        # Sorted, so that two processes with the same GPUs never wait for each other.
        for name in sorted({name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")} - NO_GPU):
            held.enter_context(_locked(name, within_s))
        yield


@contextlib.contextmanager
def _locked(gpu: str, within_s: float) -> Iterator[None]:
    # A socket in the abstract namespace leaves no file, and the kernel frees it when its process ends.
    with socket.socket(socket.AF_UNIX) as lock:
        until = time.monotonic() + within_s
        while not _bound(lock, f"\0troupe-{os.getuid()}-gpu-{gpu}"):
            if time.monotonic() > until:
                _log.warning("another process changes the memory of GPU %s for more than %g s", gpu, within_s)
                break
            # A long wait must not look like a hung worker.
            beat()
            time.sleep(_LOOK_S)
        yield


def _bound(lock: socket.socket, address: str) -> bool:
    try:
        lock.bind(address)
    except OSError as error:
        # Any other error would not end by waiting.
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True
