"""Block around the creation of a process group of several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from components.registry import find
from core.context import WorkloadContext, current
from plugins.collective_watch.state import BUFFER_SIZE
from plugins.collective_watch.watch import Watch

AFTER_END = 0.95
"""Timeout of a collective of NCCL as a share of `stall_timeout`. NCCL ends the process, and the job restarts from its
checkpoint. It is reached if the watch could not report the hang, which it does earlier."""
AFTER_ERROR = 1.5
"""Timeout of a collective of gloo as a share of `stall_timeout`. gloo raises an error, which ends the job. So the
supervisor has to end the rank first."""
_RECORDS = "256"
"""Number of collectives that torch's flight recorder keeps. The record of one takes 1 kB."""


@contextmanager
def guarded(timeout_s: float) -> Iterator[float]:
    """Watch the collectives of the process group that the block creates.

    Args:
        timeout_s: longest timeout of a collective in seconds.

    Yields:
        The timeout for the creation of the group in seconds.
    """
    context = workload()
    limit = 0.0
    if context is not None:
        limit = float(getattr(context.config, "stall_timeout", 0.0))
    _record(context)
    handshake = find("handshake", "group")
    with (handshake or nullcontext)(timeout_s) as opening_s:
        yield opening_s
        # Before the handshake ends, whose collectives would otherwise have the short timeout of the creation.
        set_timeouts(timeout_s, limit)
    if context is not None:
        role = str(context.identity.role)
        Watch(role, _store_address(), limit, _reporter(context), _log_folder(context)).start()


def workload() -> WorkloadContext | None:
    """Return the context of the workload, or None in a script without a job."""
    try:
        return current()
    except RuntimeError:
        return None


def set_timeouts(timeout_s: float, limit: float, group: Any = None) -> None:
    """Set the timeout of the collectives of a process group.

    Args:
        timeout_s: longest timeout in seconds.
        limit: `stall_timeout` in seconds, or 0.
        group: process group. Default: that of all ranks.
    """
    group = group or dist.group.WORLD
    for device in group._device_types:
        seconds = timeout_s
        if limit and device.type == "cpu":
            seconds = min(timeout_s, AFTER_ERROR * limit)
        elif limit:
            seconds = min(timeout_s, AFTER_END * limit)
        group._get_backend(device)._set_default_timeout(timedelta(seconds=seconds))


def _record(context: WorkloadContext | None) -> None:
    """Turn on torch's flight recorder, before the first process group reads its settings."""
    os.environ.setdefault(BUFFER_SIZE, _RECORDS)
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if context is not None and (folder := _log_folder(context)) is not None:
        path = f"{folder}/nccl_timeout_{context.identity.role}_"
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", path)


def _log_folder(context: WorkloadContext) -> Path | None:
    """Return the folder of the logs of the run, or None if the job has no run folder."""
    run_dir = getattr(context.config, "run_dir", None)
    if not run_dir:
        return None
    folder = Path(run_dir, "logs")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _store_address() -> tuple[str, int]:
    """Return the address of the rendezvous store of the default process group."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.host, store.port


def _reporter(context: WorkloadContext) -> Callable[[str], None]:
    """Return the callback that reports a hang of this rank to the supervisor, which ends the rank."""
    identity = context.identity
    return lambda text: context.emit("hung", (identity.role, identity.rank, identity.attempt, text))
