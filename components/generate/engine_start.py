"""Start of a rollout engine that measures the memory of its GPUs and starts processes of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from components.models.gpu_lock import gpu_memory_locked

T = TypeVar("T")

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables of the process group of a role."""

ENGINE_PID = "TROUPE_ENGINE_PID"
"""Environment variable with the id of the process that started an engine, for the processes of the engine."""


def started(make: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return `make(*arguments, **named)`, which starts an engine.

    The memory of the GPUs is locked meanwhile. The variables of this process's own process group are hidden, because
    the processes of the engine inherit the environment and have a group of their own.
    """
    os.environ[ENGINE_PID] = str(os.getpid())
    hidden = {name: os.environ.pop(name) for name in RENDEZVOUS if name in os.environ}
    try:
        return undisturbed(make, *arguments, **named)
    finally:
        os.environ.update(hidden)


def undisturbed(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return `call(*arguments, **named)`, while the memory of the GPUs is locked."""
    with gpu_memory_locked():
        return call(*arguments, **named)
