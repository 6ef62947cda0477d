"""Rank of the tests of the handshake on two machines: `python -m tests.plugins.handshake.rank PART LIMIT [ADDRESS]`."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from components.train.process_group import _meeting_store
from plugins.handshake.ends import fetch, serve
from plugins.handshake.group import ATTEMPTS, check_collectives, checked_group


def group(limit: float) -> str:
    """Create the group of two ranks, and return the time that the handshake takes."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    with checked_group(f"ACTOR-{rank}", "ACTOR", limit, 120):
        store = _meeting_store(rank, 2, timedelta(seconds=120))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=limit / ATTEMPTS)
        )
    # Rank 1 ends as if its machine were lost, once the group is there.
    if rank and "ENDS" in os.environ:
        os._exit(0)
    began = time.monotonic()
    check_collectives(f"ACTOR-{rank}", "ACTOR", limit, int(os.environ["NBYTES"]))
    seconds = time.monotonic() - began
    dist.destroy_process_group()
    return f"{seconds:.3f}"


def main(part: str, limit: str, *address: Any) -> None:
    """Run one part, and print its result or its error."""
    began = time.monotonic()
    try:
        if part == "group":
            print("result", group(float(limit)), flush=True)
        elif part == "serve":
            print(*serve(address[0], int(os.environ["NBYTES"]), 1, float(limit)), flush=True)
            sys.stdin.read()
        else:
            print("result", fetch((address[0], int(address[1])), int(os.environ["NBYTES"]), float(limit)), flush=True)
    except ConnectionError as error:
        print(f"{time.monotonic() - began:.1f} s: {error}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
