"""End of the communicators of this process, after which a kernel that waits for a dead rank returns."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

_log = logging.getLogger(__name__)


def abort_groups(groups: dict[Any, Any] | None = None) -> int:
    """Abort the communicators of NCCL of all process groups. Return their number.

    The processes of gloo do not need it: its operations raise an error as soon as a connection has ended.

    Args:
        groups: process groups, as the keys of a dictionary. Default: all of this process.
    """
    world: Any = dist.distributed_c10d._world
    aborted = 0
    for group in list(world.pg_map if groups is None else groups):
        for backend in backends_of(group):
            try:
                backend.abort()
                aborted += 1
            except RuntimeError as error:
                # Another thread may have ended it. The next one has to be aborted all the same.
                _log.info("a communicator could not be aborted: %s", error)
    return aborted


def backends_of(group: Any) -> list[Any]:
    """Return the backends of a process group whose operations run on GPUs."""
    kinds = [device for device in group._device_types if device.type == "cuda"]
    backends = [group._get_backend(device) for device in kinds]
    return [backend for backend in backends if hasattr(backend, "abort")]
