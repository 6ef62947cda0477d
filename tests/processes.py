"""Helpers that check if processes and resources of a run have ended."""

from __future__ import annotations

import time
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return True if a process is running. A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it may also end between opening and reading
        return False


def wait_until_gone(*pids: int, timeout_s: float = 120.0) -> None:
    """Wait until all processes have ended. AssertionError after the timeout."""
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there after {timeout_s:g} s: {left}"
        time.sleep(0.01)


def left_behind(run_id: str) -> list[str]:
    """Return the remaining resources of a run: shared memory, actors, and placement groups of this process's Ray."""
    from ray._private import state
    from ray.util import placement_group_table

    remaining = [str(path) for path in Path("/dev/shm").glob(f"troupe-{run_id}*")]
    deadline = time.monotonic() + 60  # Ray's list is a little behind
    while (actors := [a for a in state.actors().values() if a["State"] != "DEAD"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    remaining += [f"actor {actor['ActorClassName']} in process {actor['Pid']}" for actor in actors]
    groups = placement_group_table().values()
    return remaining + [g["name"] for g in groups if run_id in g["name"] and g["state"] != "REMOVED"]
