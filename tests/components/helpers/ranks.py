"""Ranks of the training tests: processes forked from one that has imported torch and transformers."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

WORLD_SIZES = [1, pytest.param(2, marks=pytest.mark.full)]
NIGHTLY_ON_TWO = [1, pytest.param(2, marks=pytest.mark.nightly)]
"""World sizes of tests whose two-rank case is covered by other tests of the full tier."""
PARTS = ("train_worker", "group_worker", "publish_worker", "mesh_worker", "expert_worker")
MAY_TAKE_S = 540
"""Timeout against a hang, far above the duration of any run on a busy machine."""

# Imports take longer than most of the work of the ranks.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([f"tests.components.helpers.{part}" for part in PARTS])


def run_ranks(work: Callable[..., Any], world_size: int, folder: Path, *arguments: object) -> list[Any]:
    """Return the result of `work(*arguments)` on each rank. The ranks must print nothing and find no compiler.

    Args:
        work: a function of a module, which the ranks import.
        world_size: one is a plain process: it knows of no other ranks.
        folder: where each rank leaves what it prints, what it compiles, and what `work` gives.
        arguments: of `work`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous: dict[str, object] = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    try:
        for rank in range(world_size):
            rank_arguments = (work, arguments, folder, rank, rendezvous if world_size > 1 else {})
            process = FORKS.Process(target=_run_rank, args=rank_arguments, daemon=True)
            process.start()
            processes.append(process)
        running = {process.sentinel: rank for rank, process in enumerate(processes)}
        while running:
            ended = multiprocessing.connection.wait(list(running), MAY_TAKE_S)
            assert ended, f"the ranks {sorted(running.values())} hang"
            for sentinel in ended:
                rank = running.pop(sentinel)
                processes[rank].join()
                assert (processes[rank].exitcode, (folder / f"log{rank}.txt").read_text()) == (0, "")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _run_rank(
    work: Callable[..., Any], arguments: tuple[object, ...], folder: Path, rank: int, rendezvous: dict[str, object]
) -> None:
    """Run `work` in a rank's process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        os.environ.pop(name, None)
    if rendezvous:
        os.environ["RANK"] = str(rank)
        os.environ.update({name: str(value) for name, value in rendezvous.items()})
    # Hide all compilers and all compiled extensions.
    os.environ["PATH"] = str(folder)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    with (folder / f"log{rank}.txt").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    torch.save(work(*arguments), folder / f"rank{rank}.pt")
    # Rank 0 has the store. If it ended while another rank used it, that rank would print a warning.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    # As the documentation of init_process_group advises.
    os._exit(0)
