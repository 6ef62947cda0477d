"""Whether processes are still there."""

from __future__ import annotations

import time
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it may also end between opening and reading
        return False


def wait_until_gone(*pids: int, timeout_s: float = 120.0) -> None:
    """Wait until all of them have ended; the limit is only a guard against one that never does."""
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there after {timeout_s:g} s: {left}"
        time.sleep(0.01)


def left_behind(run_id: str) -> list[str]:
    """Whatever of a run is still there: shared memory, actors, placement groups of the Ray of this process."""
    from ray._private import state
    from ray.util import placement_group_table

    found = [str(path) for path in Path("/dev/shm").glob(f"troupe-{run_id}*")]
    deadline = time.monotonic() + 60  # Ray's list is a little behind
    while (actors := [a for a in state.actors().values() if a["State"] != "DEAD"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    found += [f"actor {actor['ActorClassName']} in process {actor['Pid']}" for actor in actors]
    groups = placement_group_table().values()
    return found + [g["name"] for g in groups if run_id in g["name"] and g["state"] != "REMOVED"]
