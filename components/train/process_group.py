"""Initialization of torch's default process group from environment variables."""

from __future__ import annotations

import atexit
import os
import socket
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from components.models.device import compute_device
from components.registry import find


def init_process_group(timeout_s: float = 86400.0) -> None:
    """Initialize the default process group from the environment, unless there is one already.

    RANK and WORLD_SIZE set the ranks, MASTER_ADDR and MASTER_PORT the address of the rendezvous, LOCAL_RANK the device.
    If WORLD_SIZE is missing or 1, no address or port is needed. The backend is gloo for tensors in host memory and nccl
    for tensors on GPUs.

    A script of several ranks should end with `os._exit` after flushing its output. DeepSpeed's parameters keep gloo's
    threads alive even after the group is destroyed, and the shutdown of the interpreter then aborts in rare cases. (The
    workers of a job are ended by the job.)

    Args:
        timeout_s: longest timeout of a collective in seconds, after which it fails if a rank did not join.

    Raises:
        ValueError: a variable is missing, or a group of another size exists already.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.cuda.is_available():
        # Without the variable, DeepSpeed logs a warning when it is imported, which peft does when a model is saved.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        if "WORLD_SIZE" in os.environ and dist.get_world_size() != world_size:
            raise ValueError(
                f"this process is already in a group of {dist.get_world_size()}, but WORLD_SIZE={world_size}; another "
                "library made that group first: make the process group before it is imported"
            )
        return
    # NCCL logs a warning at exit if the process group has not been destroyed.
    atexit.register(_leave_process_group)
    if torch.cuda.is_available():
        # Ray makes only the devices of a process visible, numbered from 0, so the local rank may be too high. The
        # variable is changed because DeepSpeed reads it too.
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # Rank 0 gathers weights in one group of nccl while it broadcasts them in another. Without an order of the two,
        # which nccl has from version 2.26, they may wait for each other on its GPU.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    gpu = device if (device := compute_device()).type == "cuda" else None
    # gloo for objects, which nccl would copy through the GPU.
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world_size > 1 and missing:
        # core sets them for train roles
        raise ValueError(f"the environment has WORLD_SIZE={world_size} without {', '.join(missing)}; set all or none")
    rank = int(os.environ["RANK"]) if world_size > 1 else 0
    # A plug-in watches collectives, in which a single rank waits for nobody.
    guard = find("process group", "guard") if world_size > 1 else None
    with (guard or nullcontext)(timeout_s) as opening_s:
        store = _meeting_store(rank, world_size, timedelta(seconds=timeout_s)) if world_size > 1 else dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        # Without `device_id`, nccl connects only at the first collective, and guesses the device of a barrier.
        timeout = timedelta(seconds=opening_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=gpu)


def _meeting_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store | None:  # pyright: ignore[reportPrivateImportUsage]
    """Return a rendezvous store that listens on MASTER_ADDR only, whereas torch's default store listens on all
    addresses.

    Return None, which selects torch's default store, if MASTER_ADDR is a host name or torchrun provides a store.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ or not (":" in address or address.replace(".", "").isdecimal()):
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family).detach() if rank == 0 else None
    return dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listening)  # pyright: ignore[reportPrivateImportUsage]


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
