"""The default process group of torch, made from the environment."""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from components.models.device import compute_device


def init_process_group(timeout_s: float = 1800.0) -> None:
    """Make the default process group that the environment describes; nothing happens when there is one.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT give the ranks and where they meet, LOCAL_RANK the device. With
    WORLD_SIZE absent or 1 nobody is met, and no address or port is needed. gloo on CPU, nccl on CUDA.

    A script of several ranks ends best with `os._exit`, once its output is flushed. DeepSpeed's parameters keep gloo's
    threads whatever is destroyed, and tearing the interpreter down beneath them aborts it, rarely. (Workloads of a job
    are ended from outside.)

    Args:
        timeout_s: seconds after which a collective that some rank did not join fails.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.cuda.is_available():
        # DeepSpeed would warn of it, whoever imports it: where peft is, saving a model does.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        if "WORLD_SIZE" in os.environ and dist.get_world_size() != world_size:
            raise ValueError(
                f"this process is already in a group of {dist.get_world_size()}, but WORLD_SIZE={world_size}; another "
                "library made that group first: make the process group before it is imported"
            )
        return
    # NCCL complains of groups that nobody has left.
    atexit.register(_leave_process_group)
    if torch.cuda.is_available():
        # Ray shows each process only its own devices, counted from 0; DeepSpeed reads the variable too.
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if compute_device().type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if world_size == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE={world_size} without {', '.join(missing)} in the environment; "
            "set them (core does for train roles), or leave WORLD_SIZE out"
        )
    rank = int(os.environ["RANK"])
    store = _meeting_store(rank, world_size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _meeting_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store | None:  # pyright: ignore[reportPrivateImportUsage]
    """Return a store that listens at MASTER_ADDR alone: torch's own listens at all addresses. Return None, for torch's
    own, if the address is a name or torchrun has a store.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ or not address.replace(".", "").isdecimal():
        return None
    listening = socket.create_server((address, port)).detach() if rank == 0 else None
    store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    return store(address, port, world_size, rank == 0, timeout, master_listen_fd=listening)


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
