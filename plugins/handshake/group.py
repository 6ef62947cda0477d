"""Handshake of the ranks of one process group: the rendezvous, the connections, and a collective of each size."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from components.models.device import compute_device
from core.context import current
from plugins.handshake.ends import broken, end_here, own_ip, reach
from plugins.handshake.settings import LARGE_BYTES, SMALL_BYTES, limit_of

_log = logging.getLogger(__name__)
_REMOTE = re.compile(r"remote=\[?([0-9a-fA-F.:]+)\]?:(\d+)")
_POLL_S = 0.001
ATTEMPTS = 5
"""Number of times that gloo tries to connect to a rank, each for the timeout of the group."""


@contextmanager
def opened(timeout_s: float) -> Iterator[float]:
    """Check the channels of the process group that the block creates.

    Args:
        timeout_s: longest timeout of a collective in seconds.

    Yields:
        The timeout for the creation of the group in seconds.

    Raises:
        BrokenChannel: a rank cannot reach another one.
    """
    try:
        context = current()
    except RuntimeError:
        # A script without a job has no options.
        yield timeout_s
        return
    identity = context.identity
    spans_machines = identity.local_world_size < identity.world_size
    # Each rank sees only its own GPU, so the number of GPUs of the machine is not known here.
    is_large = spans_machines or compute_device().type == "cuda"
    limit = limit_of(context.config, is_large=is_large)
    if not limit:
        yield timeout_s
        return
    with checked_group(identity.name, str(identity.role), limit, timeout_s):
        yield min(limit / ATTEMPTS, timeout_s)
    # The block has set the timeout of the collectives, which is longer than the limit.
    nbytes = SMALL_BYTES
    if is_large:
        nbytes = LARGE_BYTES
    check_collectives(identity.name, str(identity.role), limit, nbytes)


@contextmanager
def checked_group(name: str, role: str, limit: float, timeout_s: float) -> Iterator[None]:
    """Connect to rank 0 before the block, and explain an error of the block, in which the ranks connect.

    Args:
        name: name of this worker.
        role: role of the ranks.
        limit: time limit in seconds.
        timeout_s: seconds within which rank 0 has to start to listen.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    here = end_here(name, own_ip(address))
    rank_0 = f"{role}-0 at {address[0]}:{address[1]}"
    if os.environ["RANK"] != "0":
        error = reach(address, limit, limit)
        # A rank that still imports its libraries refuses connections, and a firewall may do so too.
        if "refused" in error:
            _log.warning("%s: %s does not listen yet (%s); waiting for it", here, rank_0, error)
            error = reach(address, limit, timeout_s)
        if error:
            raise broken(f"rendezvous of {role}", here, rank_0, error)
    try:
        yield
    except RuntimeError as error:
        # gloo names the other rank by its address only.
        other = f"another rank of {role} (rank 0 is at {address[0]}, and the system chooses the ports)"
        if remote := _REMOTE.search(str(error)):
            other = f"a rank of {role} at {remote[1]}:{remote[2]}"
        raise broken(f"collectives of {role}", here, other, str(error).splitlines()[0]) from error


def check_collectives(name: str, role: str, limit: float, nbytes: int) -> None:
    """Sum a small tensor, and one of `nbytes`, over all ranks.

    Raises:
        BrokenChannel: it has not ended within `limit` seconds, or has failed.
    """
    device = compute_device()
    here = end_here(name, own_ip((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))))
    for size in sorted({SMALL_BYTES, nbytes}):
        values = torch.ones(size // 4, device=device)
        error = ""
        try:
            # Asynchronous, because NCCL would wait without a limit of its own.
            work = dist.all_reduce(values, async_op=True)
            until = time.monotonic() + limit
            while work is not None and not work.is_completed() and time.monotonic() < until:
                time.sleep(_POLL_S)
            if work is None or not work.is_completed():
                error = f"not done within {limit:g} s"
            else:
                # A failed collective counts as completed. Its error is raised here.
                work.wait()
                if {float(values[0]), float(values[-1])} != {float(dist.get_world_size())}:
                    error = f"the sum of ones is {float(values[0]):g}"
        except RuntimeError as failure:
            error = str(failure).splitlines()[0]
        if error:
            what = f"collectives of {role} (all_reduce of {size:,} bytes on {device})"
            raise broken(what, here, f"one of the other {dist.get_world_size() - 1} ranks", error)
