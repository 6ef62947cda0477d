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
